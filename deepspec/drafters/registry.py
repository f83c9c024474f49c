"""Find a drafter's configuration class by name, and turn configurations into plain values and back.

A drafter of this package is known by the name of its folder; one from elsewhere by the dotted path of its
configuration class, ``package.module.Class``. Nothing is registered: a new drafter edits no file here.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepspec.drafters.base import DrafterConfig

TARGET_KEY = "_target_"


def config_class(name: str) -> type[DrafterConfig]:
    """Return the configuration class of the drafter ``name`` (``dspark``, or ``package.module.Class``)."""
    module, _, attribute = name.rpartition(".") if "." in name else (f"{__package__}.{name}.config", ".", "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"drafter {name!r} cannot be imported ({error}): correct drafter._target_") from error
    if "." in name:
        cls = getattr(found, attribute, None)
    else:
        cls = next((c for c in vars(found).values() if _is_config(c) and c.__module__ == module), None)
    if cls is None or not _is_config(cls):
        raise ConfigError(
            f"drafter {name!r} is not a dataclass with gamma, problems and build: correct drafter._target_"
        )
    return cls


def dotted_path(cls: type) -> str:
    """Return ``package.module.Class``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def drafter_to_dict(config: DrafterConfig) -> dict[str, Any]:
    """Return the configuration as plain values, its class under ``_target_``."""
    if not is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"drafter {type(config).__name__} is not a dataclass: make its configuration one")
    return {TARGET_KEY: dotted_path(type(config)), **asdict(config)}


def drafter_from_dict(values: Mapping[str, Any]) -> DrafterConfig:
    """Rebuild the configuration that ``drafter_to_dict`` wrote; every key that does not belong is reported at once."""
    if TARGET_KEY not in values:
        raise ConfigError(f"drafter.{TARGET_KEY} is missing: name the drafter's configuration class")
    cls: Any = config_class(str(values[TARGET_KEY]))
    known = {field.name for field in fields(cls)}
    given = {key: value for key, value in values.items() if key != TARGET_KEY}
    unknown = [f"drafter.{key} is not a key of {cls.__name__}: remove it" for key in given if key not in known]
    if unknown:
        raise ConfigError(unknown)
    return cls(**given)


def _is_config(candidate: object) -> bool:
    return (
        isinstance(candidate, type)
        and is_dataclass(candidate)
        and all(hasattr(candidate, name) for name in ("problems", "build"))
    )
