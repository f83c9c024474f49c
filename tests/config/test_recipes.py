"""Every recipe composes, says what the documents promise, and takes any target and data."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspec.config.compose import CONF, compose_run
from deepspec.config.messages import choices, groups
from deepspec.config.schema import RunConfig

RECIPES = choices("recipe", CONF)
TARGETS = [t for t in choices("target", CONF) if t != "path"]


def composed(*overrides: str) -> RunConfig:
    return compose_run(list(overrides), check_files=False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes(recipe: str) -> None:
    assert composed(f"recipe={recipe}", "data.path=answers.jsonl", "data=jsonl").recipe == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_recipe_takes_any_target_and_data(recipe: str) -> None:
    target = TARGETS[RECIPES.index(recipe) % len(TARGETS)]
    run = composed(f"recipe={recipe}", f"target={target}", "data=quickstart")
    assert run.target == composed("recipe=quickstart", f"target={target}").target
    assert run.data.name == "quickstart"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_on_a_screen_and_says_how_to_run_it(recipe: str) -> None:
    lines = (CONF / "recipe" / f"{recipe}.yaml").read_text().splitlines()
    comments = "\n".join(line for line in lines if line.startswith("#"))
    assert len(lines) <= 40
    assert f"recipe={recipe}" in comments or f"make {recipe.replace('_', '-')}" in comments
    assert "Expected:" in comments


@pytest.mark.parametrize("group", [g for g in groups(CONF) if g not in ("recipe", "target", "data", "drafter")])
def test_every_choice_of_a_group_composes(group: str) -> None:
    for choice in choices(group, CONF):
        composed("recipe=quickstart", f"{group}={choice}")


@pytest.mark.parametrize("size", ["4b", "8b", "14b"])
def test_the_published_settings(size: str) -> None:
    run = composed(f"recipe=published_dspark_qwen3_{size}", "data.path=answers.jsonl")
    drafter, optim = run.drafter, run.optim
    assert (drafter.gamma, drafter.num_layers, drafter.markov_rank, drafter.decay) == (7, 5, 256, 4.0)
    assert (drafter.ce, drafter.l1, drafter.confidence) == (0.1, 0.9, 1.0)
    assert (run.target.mask_token_id, run.target.target_layer_ids) == (151669, "auto")
    assert (run.data.anchors_per_sample, run.data.max_length) == (512, 4096)
    assert (optim.name, optim.lr, optim.warmup_ratio, optim.weight_decay, optim.clip_norm) == (
        "adamw",
        6e-4,
        0.04,
        0,
        1,
    )
    assert (run.engine.global_batch_size, run.train.epochs) == (512, 10)
    assert run.target.path.lower() == f"qwen/qwen3-{size}"


def test_flash_and_pro() -> None:
    flash = composed("recipe=flash", "data.path=answers.jsonl")
    assert (flash.drafter.num_layers, flash.drafter.gamma, flash.drafter.sliding_window) == (3, 5, 128)
    assert (flash.drafter.markov_rank, flash.engine.zero_stage, flash.engine.precision) == (256, 1, "bf16")
    assert (flash.features.source, flash.target.path) == ("online", "Qwen/Qwen3-4B")
    pro = composed("recipe=pro", "data.path=answers.jsonl")
    assert (pro.drafter.num_layers, pro.drafter.gamma, pro.drafter.sliding_window) == (5, 7, None)
    assert (pro.engine.zero_stage, pro.target.path) == (2, "Qwen/Qwen3-14B")


def test_the_quickstart_finds_its_data_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = composed("recipe=quickstart")
    assert Path(run.data.train) == CONF.parent.parent / "data" / "quickstart" / "train.jsonl"
    assert Path(run.data.train).is_absolute()


def test_data_path_becomes_the_training_file() -> None:
    run = composed("recipe=flash", "data.path=some/My.Answers.jsonl", "data.test=t.jsonl")
    assert (run.data.train, run.data.test, run.data.name) == ("some/My.Answers.jsonl", "t.jsonl", "my.answers")


def test_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert composed("recipe=quickstart").paths.run == "runs/quickstart-smollm2"
    monkeypatch.setenv("DEEPSPEC_RUNS", "/scratch/runs")
    monkeypatch.setenv("DEEPSPEC_RUN_ID", "job-17")
    monkeypatch.setenv("DEEPSPEC_CACHE", "/scratch/cache")
    paths = composed("recipe=quickstart").paths
    assert (paths.run, paths.cache) == ("/scratch/runs/job-17", "/scratch/cache")
