"""The runs of a study: their commands, order and settings, and the mistakes that are found before the first begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspec.comparison.plan import plan_runs, word
from deepspec.config.arguments import groups_of, parse
from deepspec.config.compose import CONF, compose, compose_run
from deepspec.config.resolve import to_plain
from deepspec.config.study import CompareCommand, StudyConfig, StudyPaths, VariantConfig
from deepspec.errors import ConfigError

SHARED = ("target=smollm2", "data.limit=6")


def command(**variants: Any) -> CompareCommand:
    study = StudyConfig(
        name="mine",
        recipe="quickstart",
        overrides=SHARED,
        variants={name: VariantConfig(**given) for name, given in variants.items()},
        baseline=next(iter(variants)),
        data_seed=7,
    )
    return CompareCommand(study=study, paths=StudyPaths(runs="/tmp/some runs"))


def problems(**variants: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan_runs(command(**variants))
    return caught.value.problems


def test_runs_and_their_commands() -> None:
    runs = plan_runs(
        command(
            base={"seeds": (0, 3)},
            flash={"recipe": "quickstart_dflash", "overrides": ("optim.lr=1e-3",), "seeds": (5,)},
        )
    )
    assert [run.name for run in runs] == ["base-seed0", "flash-seed5", "base-seed3"], "first seeds first"
    flash = runs[1]
    assert flash.folder == Path("/tmp/some runs/mine/flash-seed5")
    words = list(flash.train[3:])
    assert words[:4] == ["recipe=quickstart_dflash", *SHARED, "optim.lr=1e-3"]
    composed = to_plain(compose_run(words))
    assert composed == flash.config, "the command composes what was planned"
    assert (composed["seed"], composed["data"]["seed"], composed["optim"]["lr"]) == (5, 7, 1e-3)
    assert composed["paths"]["run"] == str(flash.folder)
    assert flash.evaluate[2:4] == ("deepspec.evaluate", f"run='{flash.folder}'")
    assert {"evaluate.limit=5", "evaluate.confidence_threshold=null"} <= set(flash.evaluate)
    cfg = compose(parse(list(flash.evaluate[3:]), groups_of(CONF)).hydra, "evaluate")
    assert cfg["run"] == str(flash.folder) and cfg["evaluate"] == flash.config["evaluate"]
    assert cfg["data"]["test"] == flash.config["data"]["test"]


def test_every_mistake_is_told_once_before_anything_starts() -> None:
    wrong = "drafter.gama=3"
    found = problems(a={"overrides": (wrong,)}, b={"overrides": (wrong, "optim.lr=-1")}, c={"recipe": "quickstrt"})
    assert len(found) == 3
    assert "study.variants, a, b: drafter.gama: no such key; did you mean drafter.gamma?" in found
    assert "study.variants, b: optim.lr=-1.0: must not be negative" in found
    assert any("study.variants, c: recipe=quickstrt: no such choice; did you mean quickstart" in p for p in found)


def test_all_variants_decode_the_same_prompts() -> None:
    (found,) = problems(a={}, b={"overrides": ("evaluate.limit=2", "evaluate.gamma=3")})
    assert "study.variants.b: evaluate.limit=2, but 5 in the baseline a" in found
    (found,) = problems(a={"overrides": ("data.test=null",)})
    assert "data.test is not set" in found


@pytest.mark.parametrize(
    "text", ["runs/a-1", "/a b/c", "/home/jürgen/runs", "it's", "a\\'b", "end\\", "12", "null", "x=1,y", "[1]", '"q"']
)
def test_a_word_is_read_back_as_it_was_meant(text: str) -> None:
    cfg = compose(parse(["recipe=quickstart", word("paths.run", text)], groups_of(CONF)).hydra)
    assert cfg.paths.run == text
