"""From a study to its runs: one training and one evaluation for each seed of each variant.

Every run is composed here as its own command will compose it, so that all mistakes are found before the first one
starts, and so that a run folder can be compared with what it should hold.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.config.compose import compose_run, config_dir
from deepspec.config.resolve import to_plain
from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepspec.config.study import CompareCommand, StudyConfig, VariantConfig

Config = dict[str, Any]

SAME_PROMPTS = (
    "target.path", "target.revision", "target.template_options", "data.test", "evaluate.limit",
    "evaluate.max_new_tokens", "evaluate.temperature",
)  # fmt: skip
"""Settings that decide which texts are decoded: a comparison paired by prompt needs the same."""
SAME_COURSE = ("data.", "generate.", "engine.global_batch_size", "train.epochs", "train.max_steps")
"""Settings that decide which samples and anchors come in which step, and how many steps there are."""
_NO_COURSE = ("data.name", "data.path", "data.validation", "data.test")
_PLAIN_PATH = re.compile(r"[\w.-]*(/[\w.@%+-]+)+", re.ASCII)
"""What Hydra reads without quotes; a word without a slash could be a number, null or true."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    variant: str
    seed: int
    folder: Path
    train: tuple[str, ...]
    """Command that trains it, or goes on."""
    evaluate: tuple[str, ...]
    """Command that evaluates it."""
    config: Config
    """Resolved, as plain values."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.folder.name


def plan_runs(command: CompareCommand) -> list[PlannedRun]:
    """Return the runs: the first seed of every variant, then the second, so that an early stop leaves a whole table.

    Raises:
        ConfigError: with every mistake in the recipes and overrides.
    """
    study, parent = command.study, Path(command.paths.runs) / command.study.name
    words = {name: _words(study, variant) for name, variant in study.variants.items()}
    configs = _composed(words)
    problems = list(_unlike_prompts(study, configs))
    if problems:
        raise ConfigError(problems)
    found = config_dir()
    options = () if found is None else ("--config-dir", found)
    planned = [
        (index, _planned(parent / f"{name}-seed{seed}", name, seed, words[name], options, configs[name]))
        for name, variant in study.variants.items()
        for index, seed in enumerate(variant.seeds)
    ]
    return [run for _, run in sorted(planned, key=lambda item: item[0])]


def other_course(study: StudyConfig, configs: dict[str, Config]) -> Iterator[str]:
    """Yield what sets a variant's samples, anchors or steps apart from the baseline's; the seeds are the study's."""
    base = flat(configs[study.baseline])
    for name, config in configs.items():
        own = flat(config)
        keys = [k for k in own if k.startswith(SAME_COURSE) and k not in _NO_COURSE and own[k] != base.get(k)]
        if keys:
            listed = ", ".join(f"{k}={json.dumps(own[k])} (baseline {json.dumps(base.get(k))})" for k in keys)
            yield f"{name} does not see the baseline's samples step by step: {listed}"


def flat(config: Config) -> dict[str, Any]:
    """Return plain settings by their dotted keys, two levels deep."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        values |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return values


def word(key: str, value: Any) -> str:
    """Return ``key=value`` as Hydra's command line reads it back."""
    if not isinstance(value, str):
        return f"{key}={json.dumps(value)}"
    return f"{key}={value}" if _PLAIN_PATH.fullmatch(value) else f"{key}={_quoted(value)}"


def _quoted(text: str) -> str:
    """Quote for Hydra: a backslash counts only before a quote, and those before one are doubled."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def _words(study: StudyConfig, variant: VariantConfig) -> list[str]:
    recipe = variant.recipe or study.recipe
    return [f"recipe={recipe}", *study.overrides, *variant.overrides, f"data.seed={study.data_seed}"]


def _planned(
    folder: Path, variant: str, seed: int, words: list[str], options: tuple[str, ...], config: Config
) -> PlannedRun:
    program = (sys.executable, "-m")
    own = config | {"seed": seed, "paths": config["paths"] | {"run": str(folder)}}
    settings = (word(f"evaluate.{k}", v) for k, v in own["evaluate"].items())
    files = (word("data.test", own["data"]["test"]),)
    return PlannedRun(
        variant=variant,
        seed=seed,
        folder=folder,
        train=(*program, "deepspec.train", *options, *words, f"seed={seed}", word("paths.run", str(folder))),
        evaluate=(*program, "deepspec.evaluate", word("run", str(folder)), *settings, *files),
        config=own,
    )


def _composed(words: dict[str, list[str]]) -> dict[str, Config]:
    """Compose every variant; a mistake that several share is told once."""
    configs: dict[str, Config] = {}
    found: dict[str, list[str]] = {}
    for name, arguments in words.items():
        try:
            configs[name] = to_plain(compose_run(arguments))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(name)
    if found:
        raise ConfigError([_told(problem, names, len(words)) for problem, names in found.items()])
    return configs


def _told(problem: str, names: list[str], variants: int) -> str:
    where = "every variant" if len(names) == variants > 1 else ", ".join(names)
    return f"study.variants, {where}: {problem}"


def _unlike_prompts(study: StudyConfig, configs: dict[str, Config]) -> Iterator[str]:
    base = flat(configs[study.baseline])
    if base["data.test"] is None:
        yield "data.test is not set: evaluate decodes the prompts of that file; add data.test=FILE to study.overrides"
    for name, config in configs.items():
        own = flat(config)
        for key in (k for k in SAME_PROMPTS if own[k] != base[k]):
            yield (
                f"study.variants.{name}: {key}={json.dumps(own[key])}, but {json.dumps(base[key])} in the baseline "
                f"{study.baseline}; all are compared on the same texts, so set it in study.overrides"
            )
