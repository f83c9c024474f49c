"""The command line of compare, and the studies that come with the project."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from deepspec.config.compose import CONF, compose_run
from deepspec.config.messages import choices
from tests.config.conftest import Run

STUDIES = choices("study", CONF)
OWN = """
name: own
recipe: quickstart
overrides: [data.path=train.jsonl, data=jsonl]
baseline: a
variants:
  a: {seeds: [0, 1]}
  b: {overrides: [optim.lr=1e-3]}
"""


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_resolves(run: Run, name: str) -> None:
    done = run(f"study={name}", config="compare")
    assert done.code == 0, done.err
    study = done.configs[0]["study"]
    assert study["name"] == name and study["baseline"] in study["variants"] and study["hours"] == 3.0
    lines = (CONF / "study" / f"{name}.yaml").read_text().splitlines()
    assert len(lines) <= 40 and any("Expected:" in line for line in lines)


@pytest.mark.parametrize("name", STUDIES)
def test_every_variant_composes(name: str) -> None:
    study = yaml.safe_load((CONF / "study" / f"{name}.yaml").read_text())
    for variant in study["variants"].values():
        words = [*study["overrides"], *variant.get("overrides", [])]
        found = compose_run([f"recipe={variant.get('recipe', study['recipe'])}", *words], check_files=False)
        assert (found.target.name, found.data.limit, found.train.epochs) == ("smollm2", 240, 3)
        assert (found.engine.global_batch_size, found.data.anchors_per_sample) == (4, 16)


def test_a_study_of_ones_own(run: Run, folder: Path) -> None:
    (folder / "mine" / "study").mkdir(parents=True)
    (folder / "mine" / "study" / "own.yaml").write_text(OWN)
    arguments = ("--config-dir", "mine", "study=own", "study.hours=0.5", "paths.runs=elsewhere")
    done = run(*arguments, "study.variants.b.seeds=[4]", "study.variants.c.overrides=['optim.lr=1']", config="compare")
    assert done.code == 0, done.err
    found = done.configs[0]
    assert (found["study"]["hours"], found["paths"]["runs"]) == (0.5, "elsewhere")
    assert found["study"]["variants"]["b"] == {"recipe": None, "overrides": ["optim.lr=1e-3"], "seeds": [4]}
    assert list(found["study"]["variants"]) == ["a", "b", "c"]
    shown = run(*arguments, "--cfg", "job", config="compare")
    assert shown.code == 0 and "hours: 0.5" in shown.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "study: must be given; choose study= one of ablations, drafters, logits, optimisers"),
        (["study=drafter"], "study=drafter: no such choice; did you mean drafters?"),
        (["study=drafters", "study.hour=1"], "study.hour: no such key; did you mean study.hours?"),
        (["study=drafters", "study.hours=0"], "study.hours=0.0: must be above 0"),
        (["study=drafters", "study.baseline=x"], "study.baseline=x: must be one of the variants dspark, dflash"),
        (["study=drafters", "study.variants.mtp.seeds=[1,1]"], "study.variants.mtp.seeds=[1, 1]: must be"),
        (["study=drafters", "study.variants.mtp.seed=[1]"], "study.variants.mtp.seed: no such key; did you mean"),
        (["study=drafters", "study.variants.mtp.overrides=['seed=3']"], "seed=3 is set for every run by the command"),
        (["study=drafters", "study.variants.mtp.overrides=[fast]"], "fast is no key=value"),
        (["study=drafters", "+study.variants.a/b.seeds=[0]"], "a/b"),
        (["study=drafters", "recipe=quickstart"], "put recipe=... into study.overrides"),
    ],
)
def test_mistakes(run: Run, arguments: list[str], says: str) -> None:
    done = run(*arguments, config="compare")
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err and done.configs == []


def test_not_under_a_launcher(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("study=drafters", config="compare")
    assert done.code == 2 and "start it without a launcher" in done.err


def test_a_study_belongs_to_compare_only(run: Run) -> None:
    done = run("recipe=quickstart", "study=drafters")
    assert done.code == 2 and "study: no such key" in done.err
    help_text = run("--help", config="compare").out
    assert "study=drafters" in help_text and "study.hours" in help_text
    assert "study" not in run("--help").out
