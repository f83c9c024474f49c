"""From a composed OmegaConf tree to frozen dataclasses: past this module there is neither Hydra nor OmegaConf.

Every mistake is collected and reported in one ``ConfigError``: unknown keys, wrong types and choices, missing values,
and the rules that tie several keys together (``rules.py``).
"""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from deepspec.config.convert import INVALID, Problems, build, convert, default_of, near, type_hints
from deepspec.config.rules import file_problems, rule_problems
from deepspec.config.schema import MISSING, RunConfig
from deepspec.errors import ConfigError

OVERRIDABLE = ("target", "data", "generate", "features", "engine", "tracker", "evaluate", "export")
"""Groups of a trained run that evaluate and export may override; the rest is fixed by the training."""


def resolve(cfg: DictConfig, *, complete: bool = True, check_files: bool = True) -> RunConfig:
    """Return the recipe as dataclasses.

    Args:
        cfg: What Hydra composed.
        complete: Refuse missing values. ``--cfg job`` passes False; the result may then lack fields.
        check_files: Look whether the data files and a local target are there.

    Raises:
        ConfigError: With every mistake that was found.
    """
    problems = Problems(complete=complete)
    run = _build_run(plain_values(cfg, problems), problems)
    problems.found += rule_problems(run, partial=problems.refused)
    if check_files:
        problems.found += file_problems(run, partial=problems.refused)
    _raise(problems)
    return run


def resolve_command(cfg: DictConfig, command: type, *, complete: bool = True) -> Any:
    """Return an ``EvaluateCommand`` or ``ExportCommand``: the run's own config with the given groups on top.

    Raises:
        ConfigError: With every mistake that was found.
    """
    problems = Problems(complete=complete)
    given = plain_values(cfg, problems)
    groups = {name: given.pop(name) for name in OVERRIDABLE if name in given}
    for name in [n for n in given if n in type_hints(RunConfig) and n not in type_hints(command)]:
        del given[name]
        problems.add(f"{name}: is fixed by the training run; what can be overridden is {', '.join(OVERRIDABLE)}")
    if "source" not in type_hints(command) and given.pop("source", None) is not None:
        problems.add("source: deepspec.export reads what other projects wrote; run=FOLDER is then the folder it made")
    made = build(command, given, "", problems, skip=("config",))
    config = _trained_config(made, groups, problems)
    _raise(problems)
    object.__setattr__(made, "config", config)
    return made


def save_config(config: RunConfig, path: Path) -> None:
    """Write a resolved config as YAML of plain values; the drafter carries its ``_target_``."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    temporary.replace(path)


def load_config(path: Path) -> RunConfig:
    """Read what ``save_config`` wrote (the file, or the run folder that holds it as ``config.yaml``)."""
    problems = Problems()
    config = _build_run(_read_run(path, problems), problems)
    _raise(problems)
    return config


def to_plain(value: Any) -> Any:
    """Return dataclasses and tuples as dicts and lists; a drafter's config keeps its class in ``_target_``."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = {f.name: to_plain(getattr(value, f.name)) for f in fields(value) if hasattr(value, f.name)}
        drafter = not type(value).__module__.startswith("deepspec.config.")
        return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}", **plain} if drafter else plain
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    return [to_plain(v) for v in value] if isinstance(value, list | tuple) else value


def plain_values(node: DictConfig | ListConfig, problems: Problems, path: str = "") -> Any:
    """Return the tree as dicts, lists and scalars with interpolations resolved; what is missing stays ``???``."""
    if isinstance(node, ListConfig):
        return [_plain_value(node, i, f"{path}[{i}]", problems) for i in range(len(node))]
    return {k: _plain_value(node, k, f"{path}.{k}" if path else k, problems) for k in map(str, node)}


def with_defaults(cfg: DictConfig) -> DictConfig:
    """Return the composed tree with every key that it leaves to the schema, in the schema's order."""
    given = OmegaConf.to_container(cfg, resolve=False)
    if not isinstance(given, dict):
        return cfg
    full: dict[str, Any] = {}
    for item in fields(RunConfig):
        hint = type_hints(RunConfig)[item.name]
        cls = _drafter_class(given.get("drafter")) if item.name == "drafter" else hint
        if isinstance(cls, type) and is_dataclass(cls):
            defaults = {f.name: to_plain(default_of(f)) for f in fields(cls)}
            own = given.get(item.name, {})
            chosen = {"_target_": own["_target_"]} if "_target_" in own else {}
            full[item.name] = {**chosen, **defaults, **own}
        else:
            full[item.name] = given.get(item.name, default_of(item))
    return OmegaConf.create(full)


def known_keys(drafter: type | None = None) -> tuple[str, ...]:
    """Return every dotted key of a recipe."""
    keys: list[str] = []
    for name, hint in type_hints(RunConfig).items():
        cls = drafter if name == "drafter" else hint
        keys.append(name)
        if isinstance(cls, type) and is_dataclass(cls):
            keys += [f"{name}.{leaf.name}" for leaf in fields(cls)]
    return tuple(keys)


def _build_run(values: Any, problems: Problems) -> RunConfig:
    drafter_values = values.get("drafter") if isinstance(values, dict) else None
    drafter_class = _drafter_class(drafter_values, problems)
    problems.known_keys = known_keys(drafter_class)
    others = {k: v for k, v in values.items() if k != "drafter"}
    run = build(RunConfig, others, "", problems, skip=("drafter",))
    if drafter_class is not None and isinstance(drafter_values, dict):
        own = {k: v for k, v in drafter_values.items() if k != "_target_"}
        object.__setattr__(run, "drafter", convert(drafter_class, own, "drafter", problems))
    return run


def _drafter_class(values: Any, problems: Problems | None = None) -> type | None:
    """Import the class that ``drafter._target_`` names; None, and a reason, when that is not possible."""
    problems = problems or Problems()
    name = values.get("_target_", "") if isinstance(values, dict | DictConfig) else ""
    module, _, attribute = str(name).rpartition(".")
    if not module:
        problems.refused = True
        problems.add(f"drafter._target_={name}: must be the dotted path of a drafter's configuration class")
        return None
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        problems.refused = True
        problems.add(f"drafter._target_={name}: cannot be imported ({error})")
        return None
    if isinstance(found, type) and is_dataclass(found):
        return found
    problems.refused = True
    problems.add(f"drafter._target_={name}: must be a frozen dataclass")
    return None


def _plain_value(node: DictConfig | ListConfig, key: Any, path: str, problems: Problems) -> Any:
    if OmegaConf.is_missing(node, key):
        return MISSING
    try:
        value = node[key]
    except InterpolationToMissingValueError:
        return MISSING if not problems.complete else INVALID  # the missing key itself is reported
    except OmegaConfBaseException as error:
        problems.refused = True
        problems.add(f"{path}: {str(error).splitlines()[0]}")
        return INVALID
    return plain_values(value, problems, path) if isinstance(value, DictConfig | ListConfig) else value


def _trained_config(command: Any, groups: dict[str, Any], problems: Problems) -> RunConfig | None:
    """Load the run's config and lay the given groups over it."""
    if not hasattr(command, "run"):
        return None
    folder = Path(command.run).expanduser()
    if not (folder / "config.yaml").is_file() and (folder.parent / "config.yaml").is_file() and folder.is_dir():
        if hasattr(command, "package") and command.package is None:
            object.__setattr__(command, "package", str(folder))
        folder = folder.parent
        object.__setattr__(command, "run", str(folder))
    values = _read_run(folder, problems)
    if not values:
        return None
    for name, given in groups.items():
        values[name] = {**values.get(name, {}), **given} if isinstance(given, dict) else given
    config = _build_run(values, problems)
    problems.found += rule_problems(config, partial=problems.refused, training=False)
    return config


def _read_run(path: Path, problems: Problems) -> dict[str, Any]:
    file = path / "config.yaml" if path.is_dir() else path
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        beside = sorted(p.parent.name for p in path.parent.glob("*/config.yaml")) if path.parent.is_dir() else []
        problems.add(
            f"run={path}: is no run folder, config.yaml cannot be read there ({_reason(error)})"
            + near(path.name, beside)
        )
        return {}
    if not isinstance(values, dict):
        problems.add(f"run={path}: {file} holds no keys")
        return {}
    return values


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error).splitlines()[0]


def _raise(problems: Problems) -> None:
    if problems.found:
        raise ConfigError(list(dict.fromkeys(problems.found)))
