"""Hydra's complaints about a command line in the project's own words."""

from __future__ import annotations

import re
from pathlib import Path

from deepspec.config.convert import near
from deepspec.errors import ConfigError

_CHOICE = re.compile(r"Could not find '([\w/]+)/([^'/]+)'")
_OVERRIDE = re.compile(r"Could not override '([^']+)'")
_NEEDED = re.compile(r"You must specify '([^']+)'")


def composition_error(error: Exception, conf: Path, command: str = "config") -> ConfigError:
    """Return what Hydra said to a command as a ConfigError that names the key and what may stand there."""
    text = str(error)
    if match := _CHOICE.search(text):
        return ConfigError(_unknown_choice(match[1], match[2], conf))
    if match := _NEEDED.search(text):
        return ConfigError(f"{match[1]}: must be given; choose {match[1]}= one of {', '.join(choices(match[1], conf))}")
    if match := _OVERRIDE.search(text):
        name = match[1].split("@")[0]
        if name in groups(conf) and command == "compare":
            return ConfigError(f"{name}: belongs to the runs of the study; put {name}=... into study.overrides")
        if name in groups(conf):
            return ConfigError(f"{name}: was chosen by the training run; here single keys are set, {name}.KEY=VALUE")
        return ConfigError(f"{name}: no such key{near(name, groups(conf))}")
    if "Ambiguous value" in text:
        return ConfigError(f"{text.splitlines()[0]} Several values need --multirun; a list is written key=[1,2]")
    override = getattr(error, "override", None)
    lines = [
        line for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line and "hydra.cc" not in line
    ]
    said = " ".join(line.strip() for line in lines[:4]) or type(error).__name__
    return ConfigError(f"{str(override).removeprefix('++')}: cannot be read: {said}" if override else said)


def choices(group: str, conf: Path) -> list[str]:
    """Return the names that a group offers."""
    return sorted(p.stem for p in (conf / group).glob("*.yaml"))


def groups(conf: Path) -> list[str]:
    """Return the names of the groups that a run is made of."""
    return sorted(p.name for p in conf.iterdir() if p.is_dir() and p.name not in ("hydra", "study"))


def _unknown_choice(group: str, name: str, conf: Path) -> str:
    offered = choices(group, conf)
    return f"{group}={name}: no such choice{near(name, offered)}; choose one of {', '.join(offered)}"
