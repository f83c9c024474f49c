"""What the command line says, before Hydra sees it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from deepspec.errors import ConfigError

_LOCAL_RANK = re.compile(r"--local[-_]rank(?:=(.*))?$")
_OVERRIDE = re.compile(r"([A-Za-z_][\w.]*)=")
_TAKES_VALUE = (
    "--config-dir",
    "-cd",
    "--config-name",
    "-cn",
    "--config-path",
    "-cp",
    "--package",
    "-p",
    "--info",
    "-i",
)


@dataclass
class Arguments:
    """A command line, sorted."""

    help: bool = False
    show: str | None = None  # the value of --cfg
    show_resolved: bool = False
    multirun: bool = False
    hydra: list[str] = field(default_factory=list)  # what is left for Hydra
    delegate: bool = False  # Hydra's own business: --hydra-help, --info, completion


def parse(argv: list[str], groups: frozenset[str]) -> Arguments:
    """Sort a command line.

    DeepSpeed's launcher appends ``--local_rank``, which Hydra's parser refuses: it is dropped. Plain ``key=value``
    becomes ``++key=value``, so that Hydra lets unknown keys through and ``resolve`` can report all of them at once.

    Raises:
        ConfigError: An option or a word that no command understands.
    """
    made, rest = Arguments(), iter(argv)
    for word in rest:
        if match := _LOCAL_RANK.match(word):
            os.environ.setdefault("LOCAL_RANK", match[1] if match[1] is not None else next(rest, "0"))
        elif word in ("-h", "--help"):
            made.help = True
        elif word in ("-c", "--cfg") or word.startswith("--cfg="):
            made.show = word.partition("=")[2] or next(rest, "job")
        elif word == "--resolve":
            made.show_resolved = True
        elif word in ("-m", "--multirun"):
            made.multirun = True
            made.hydra.append(word)
        elif word.startswith("-"):
            made.delegate |= word.partition("=")[0] in (
                "--hydra-help",
                "--info",
                "-i",
                "--shell-completion",
                "-sc",
                "--version",
            )
            made.hydra += [word, next(rest, "")] if word in _TAKES_VALUE else [word]
        else:
            made.hydra.append(word)
    if made.show not in (None, "job"):  # --cfg hydra, --cfg all
        made.hydra += ["--cfg", str(made.show)] + (["--resolve"] if made.show_resolved else [])
        made.delegate = True
    _refuse_options(made.hydra)
    made.hydra = _overrides(made.hydra, groups)
    return made


def groups_of(conf: Path) -> frozenset[str]:
    """Return the names of the config groups."""
    return frozenset(p.name for p in conf.iterdir() if p.is_dir())


def _overrides(words: list[str], groups: frozenset[str]) -> list[str]:
    """Rewrite what is neither an option nor an option's value."""
    return [
        word if word.startswith("-") or (i > 0 and words[i - 1] in _TAKES_VALUE) else _override(word, groups)
        for i, word in enumerate(words)
    ]


def _override(word: str, groups: frozenset[str]) -> str:
    if "=" not in word and not word.startswith("~"):
        hint = f"recipe={word}" if re.fullmatch(r"\w+", word) else "key=value"
        raise ConfigError(f"{word}: is no key=value; did you mean {hint}?")
    match = _OVERRIDE.match(word)
    own = match is not None and match[1] not in groups and not match[1].startswith("hydra.")
    return f"++{word}" if own else word


_HYDRA_OPTIONS = {
    "--hydra-help", "--version", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc", "--config-path", "-cp",
    "--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun", "--info", "-i", "--package", "-p", "--cfg",
    "--resolve",
}  # fmt: skip


def _refuse_options(words: list[str]) -> None:
    for word in words:
        name, _, value = word.partition("=")
        if word.startswith("-") and name not in _HYDRA_OPTIONS:
            key = f"{name.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
            raise ConfigError(f"{word}: no such option; settings are written {key}, see --help")
