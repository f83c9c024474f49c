"""Write ``docs/config.md`` from the schema: ``python -m deepspec.config.docs``.

A test fails when the file is not what this module would write.
"""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from deepspec.config.compose import CONF
from deepspec.config.convert import default_of, describe, type_hints
from deepspec.config.messages import choices
from deepspec.config.schema import MISSING, EvaluateCommand, ExportCommand, RunConfig
from deepspec.config.study import StudyConfig, StudyPaths, VariantConfig

FILE = CONF.parent.parent / "docs" / "config.md"
_HEAD = """# Every key

Generated from `deepspec/config/schema.py` by `python -m deepspec.config.docs`; do not edit by hand.

A key is set on the command line (`engine.micro_batch_size=4`), in a recipe, or in a group's file under `conf/`. A
group's file is chosen by name (`engine=deepspeed`). "required" means that there is no default: the recipe, a group or
the command line gives the value. `--cfg job` prints the values a command would use."""


def config_markdown() -> str:
    """Return the whole page."""
    hints = type_hints(RunConfig)
    groups = [name for name, hint in hints.items() if is_dataclass(hint)]
    plain = [name for name in hints if name not in groups and name != "drafter"]
    parts = [_HEAD, "## Top level", _table(RunConfig, only=plain)]
    for name in groups:
        parts += [_title(name, hints[name]), _table(hints[name], f"{name}.")]
        if name == "target":
            parts += [part for drafter in choices("drafter", CONF) for part in _drafter(drafter)]
    parts += ["## Keys of evaluate", _command(EvaluateCommand), "## Keys of export", _command(ExportCommand)]
    parts += ["## Keys of compare", f"Choices: {_choices('study')}.", _table(StudyConfig, "study.")]
    parts += [_table(VariantConfig, "study.variants.NAME."), _table(StudyPaths, "paths.")]
    return "\n\n".join(parts) + "\n"


def _title(name: str, cls: type) -> str:
    summary = (cls.__doc__ or "").split("(group")[0].strip().rstrip(".")
    choose = f"\n\nChoices: {_choices(name)}." if choices(name, CONF) else ""
    return f"## {name}\n\n{summary}.{choose}"


def _choices(name: str) -> str:
    return ", ".join(f"`{name}={choice}`" for choice in choices(name, CONF))


def _drafter(choice: str) -> list[str]:
    target = yaml.safe_load((CONF / "drafter" / f"{choice}.yaml").read_text(encoding="utf-8"))["_target_"]
    module, _, name = target.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    return [f"## drafter={choice}\n\n{summary} `_target_: {target}`", _table(cls, "drafter.")]


def _command(cls: type) -> str:
    own = [name for name in type_hints(cls) if name != "config"]
    return (
        _table(cls, only=own) + "\n\nAll other keys come from the run's `config.yaml` and can be overridden one by one."
    )


def _table(cls: type, prefix: str = "", only: list[str] | None = None) -> str:
    hints = type_hints(cls)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for item in fields(cls):
        if only is None or item.name in only:
            cells = [f"`{prefix}{item.name}`", describe(hints[item.name]), _default(default_of(item))]
            rows.append(
                "| " + " | ".join([*(_escape(c) for c in cells), _escape(item.metadata.get("help", ""))]) + " |"
            )
    return "\n".join(rows)


def _default(value: Any) -> str:
    if value == MISSING:
        return "required"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{yaml.safe_dump(value, default_flow_style=True).strip().removesuffix('...').strip()}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def write(path: Path = FILE) -> None:
    """Write the page."""
    path.write_text(config_markdown(), encoding="utf-8")


if __name__ == "__main__":
    write()
