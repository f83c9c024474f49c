"""JSON files of a package, read strictly: into frozen dataclasses, and nothing is guessed.

No key may be missing, unknown, null or of another type than its field declares; every message names file and key.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from deepspec.errors import PackageError

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON_BYTES = 1 << 20

T = TypeVar("T")


def to_json(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(value), allow_nan=False))
    return plain


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a small JSON object of a package."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise PackageError(f"{path} is larger than {MAX_JSON_BYTES} bytes; a package's {name} never is")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PackageError(f"{path} is missing; give a folder that deepspec.export has written") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise PackageError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def build(cls: type[T], values: object, file: str, where: str = "") -> T:
    """Build a dataclass from the JSON values at ``where`` (``section.``) of ``file``."""
    if not isinstance(values, Mapping):
        raise PackageError(f"{file}: {where.rstrip('.')} must be an object, not {values!r}")
    hints = get_type_hints(cls, localns={"Mapping": Mapping})
    missing = [where + name for name in hints if name not in values]
    unknown = [where + str(name) for name in values if name not in hints]
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"has unknown keys {', '.join(unknown)}"] if unknown else []
        raise PackageError(f"{file} {' and '.join(parts)}; a package says everything, nothing is guessed")
    return cls(**{name: _convert(values[name], hint, file, where + name) for name, hint in hints.items()})


def _convert(value: Any, hint: Any, file: str, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):  # of one type with None
        return None if value is None else _convert(value, arguments[0], file, where)
    if origin is Literal:
        return _choice(value, arguments, file, where)
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, file, where + ".")
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, arguments[0], file, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return _mapping(value, arguments, file, where)
    if _is_plain(value, hint):
        return hint(value)
    raise PackageError(f"{file}: {where}={value!r} must be of type {getattr(hint, '__name__', hint)}")


def _mapping(value: Mapping[str, Any], arguments: tuple[Any, Any], file: str, where: str) -> dict[str, Any]:
    """Convert the values of an object, where they are dataclasses; else they are plain JSON."""
    key, item = arguments
    if not is_dataclass(item):
        return dict(value)
    return {
        _convert(name, key, file, where): _convert(found, item, file, f"{where}.{name}")
        for name, found in value.items()
    }


def _choice(value: Any, choices: tuple[Any, ...], file: str, where: str) -> Any:
    if any(type(value) is type(choice) and value == choice for choice in choices):
        return value
    raise PackageError(f"{file}: {where}={value!r} must be {' or '.join(map(repr, choices))}")


def _is_plain(value: object, hint: Any) -> bool:
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is hint
