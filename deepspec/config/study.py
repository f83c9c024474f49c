"""The keys of a study, as frozen dataclasses, and from a composed OmegaConf tree to them.

Nothing here imports torch. What the runs of a study are made of is composed elsewhere (``comparison/plan.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from deepspec.config.convert import Problems, build
from deepspec.config.resolve import plain_values
from deepspec.config.rules import world_size
from deepspec.config.schema import key
from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_TAKEN = ("recipe", "seed", "data.seed", "paths.run", "train.resume")
"""What the command sets itself in every run."""


@dataclass(frozen=True, kw_only=True)
class VariantConfig:
    """One variant of a study (``study.variants.NAME``)."""

    recipe: str | None = key("Recipe of this variant; null is study.recipe", None)
    overrides: tuple[str, ...] = key("Settings on top of study.overrides, written as on the command line", ())
    seeds: tuple[int, ...] = key("Seeds of the initial weights, one run each", (0,))


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """A comparison of training variants (group ``study``)."""

    name: str = key("Short name: the folder of its runs below paths.runs")
    recipe: str = key("Recipe that every variant starts from")
    overrides: tuple[str, ...] = key("Settings of every run, written as on the command line", ())
    variants: dict[str, VariantConfig] = key("Name -> recipe, overrides and seeds of a variant")
    baseline: str = key("Variant that the others are compared with")
    data_seed: int = key("data.seed of every run: all see the same samples and anchors in the same order", 0)
    hours: float = key(
        "Hours of one call: a run that would not fit is left to the next one; a run that was begun is not cut", 3.0
    )


@dataclass(frozen=True, kw_only=True)
class StudyPaths:
    """Folders of a study."""

    runs: str = key("Parent of the studies' folders", "runs")


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """What ``deepspec.compare`` was asked for."""

    study: StudyConfig = key("The study, chosen by study=NAME")
    paths: StudyPaths = key("Folders")


def resolve_study(cfg: DictConfig, *, complete: bool = True) -> CompareCommand:
    """Return the study as dataclasses.

    Raises:
        ConfigError: With every mistake that was found, but for those in the recipes and overrides of its runs.
    """
    problems = Problems(complete=complete, known_keys=known_keys())
    command: CompareCommand = build(CompareCommand, plain_values(cfg, problems), "", problems)
    if not problems.refused:
        problems.found += list(_problems(command.study))
    if problems.found:
        raise ConfigError(list(dict.fromkeys(problems.found)))
    return command


def known_keys() -> tuple[str, ...]:
    """Return every dotted key of the command but those of its variants."""
    parts = {"study": StudyConfig, "paths": StudyPaths}
    return tuple(f"{name}.{item.name}" for name, cls in parts.items() for item in fields(cls))


def _problems(study: StudyConfig) -> Iterator[str]:
    if world_size() > 1:
        yield "compare starts its own trainings one after the other; start it without a launcher"
    if not study.hours > 0:
        yield f"study.hours={study.hours}: must be above 0"
    if study.data_seed < 0:
        yield f"study.data_seed={study.data_seed}: must not be negative"
    for name in (study.name, *study.variants):
        if not _NAME.fullmatch(name):
            yield f"study: {name!r} names a folder; use ASCII letters, digits, dots, dashes and underscores"
    if not study.variants:
        yield "study.variants: must name at least one variant"
    elif study.baseline not in study.variants:
        yield f"study.baseline={study.baseline}: must be one of the variants {', '.join(study.variants)}"
    yield from _overrides("study.overrides", study.overrides)
    for name, variant in study.variants.items():
        where = f"study.variants.{name}"
        if not variant.seeds or len(set(variant.seeds)) < len(variant.seeds) or min(variant.seeds) < 0:
            yield f"{where}.seeds={list(variant.seeds)}: must be at least one seed, none negative and none twice"
        yield from _overrides(f"{where}.overrides", variant.overrides)


def _overrides(where: str, words: tuple[str, ...]) -> Iterator[str]:
    for word in words:
        name = word.lstrip("+~").partition("=")[0]
        if word.startswith("-") or ("=" not in word and not word.startswith("~")):
            yield f"{where}: {word} is no key=value"
        elif name in _TAKEN:
            own = {"recipe": "the key recipe", "seed": "the key seeds", "data.seed": "study.data_seed"}
            yield f"{where}: {word} is set for every run by the command; use {own.get(name, 'paths.runs')}"
