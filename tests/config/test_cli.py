"""The command line: exit codes, one clear message, launchers, sweeps, and no torch."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspec.config.arguments import groups_of, parse
from deepspec.config.compose import CONF
from deepspec.errors import ConfigError, DataError, Interrupted, TrainingError, UserError
from tests.config.conftest import Run, run_process

BASE = ("recipe=flash", "target=smollm2", "data=jsonl", "data.path=train.jsonl")


def test_cfg_job_shows_every_key(run: Run) -> None:
    done = run("--cfg", "job", "recipe=flash")
    assert done.code == 0, done.err
    assert "micro_batch_size: 1" in done.out and "max_bad_steps: 20" in done.out
    assert "path: ???" in done.out
    assert done.configs == []
    assert "run: runs/quickstart-smollm2" in run("--cfg=job", "--resolve", "recipe=quickstart").out


def test_a_process_composes_without_torch(folder: Path) -> None:
    done = run_process(folder, "deepspec.train", "--cfg", "job", "recipe=flash", "--local_rank=0")
    assert done.stderr == "0 False\n"
    assert "gamma: 5" in done.stdout
    for drafter in ("dflash", "eagle3", "mtp"):
        done = run_process(folder, "deepspec.train", "--cfg", "job", f"recipe=quickstart_{drafter}")
        assert done.stderr == "0 False\n", drafter
    wrong = run_process(folder, "deepspec.train", "recipe=flash", "sed=1")
    assert "sed: no such key; did you mean seed" in wrong.stderr
    assert wrong.stderr.endswith("2 False\n") and "Traceback" not in wrong.stderr


def test_every_command_has_a_help_that_loads_nothing(folder: Path) -> None:
    commands = "deepspec.prepare,deepspec.train,deepspec.plan,deepspec.evaluate,deepspec.export,deepspec.compare"
    done = run_process(folder, commands, "--help")
    assert done.stderr == "0 False\n" * 6
    assert done.stdout.count("Exit codes") == 6


def test_a_command_gets_dataclasses_and_leaves_no_folder(run: Run, folder: Path) -> None:
    done = run(*BASE)
    assert done.code == 0, done.err
    assert done.configs[0]["data"]["train"] == "train.jsonl"
    assert [p.name for p in folder.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize("flag", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]])
def test_launchers_may_append_the_local_rank(flag: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = parse([*BASE, *flag, "seed=3"], groups_of(CONF))
    assert made.hydra == ["recipe=flash", "target=smollm2", "data=jsonl", "++data.path=train.jsonl", "++seed=3"]


def test_an_outside_drafter_needs_no_change_of_the_package(run: Run) -> None:
    own = [f"~drafter.{key}" for key in ("num_layers", "gamma", "sliding_window", "markov_rank")]
    done = run(*BASE, "drafter._target_=toypkg.ToyConfig", *own)
    assert done.code == 0, done.err
    assert done.configs[0]["drafter"] == {"_target_": "toypkg.ToyConfig", "gamma": 3, "width": 8}


def test_an_outside_drafter_with_its_own_group_and_recipe(run: Run, folder: Path) -> None:
    for group in ("drafter", "recipe"):
        (folder / "mine" / group).mkdir(parents=True)
    (folder / "mine/drafter/toy.yaml").write_text("_target_: toypkg.ToyConfig\nwidth: 4\n")
    (folder / "mine/recipe/toy.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /drafter: toy\n  - override /target: smollm2\n"
    )
    arguments = ("--config-dir", "mine", "recipe=toy", "data.path=train.jsonl")
    done = run(*arguments)
    assert done.code == 0, done.err
    assert done.configs[0]["drafter"] == {"_target_": "toypkg.ToyConfig", "gamma": 3, "width": 4}
    assert done.configs[0]["recipe"] == "toy"
    wrong = run(*arguments, "drafter.width=5", "drafter.wdth=4")
    assert wrong.code == 2
    assert "drafter.width=5: must be even" in wrong.err
    assert "drafter.wdth: no such key; did you mean drafter.width?" in wrong.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["recipe=flsh"], "recipe=flsh: no such choice; did you mean flash?"),
        ([], "recipe: must be given"),
        (["quickstart"], "did you mean recipe=quickstart?"),
        (["--epochs", "3"], "settings are written epochs=VALUE"),
        (["recipe=flash", "target=smollm"], "target=smollm: no such choice; did you mean smollm2?"),
        (["recipe=flash", "train.max_steps=1,2"], "need --multirun"),
        (["recipe=flash", "train.max_steps=[1"], "train.max_steps=[1: cannot be read"),
        (["recipe=flash", "optimm=adamw"], "optimm: no such key; did you mean optim?"),
        (["recipe=flash", "+optim.lrr=1"], "optim.lrr: no such key"),
        (["recipe=flash", "--cfg", "job", "engine.kind=plane"], "engine.kind=plane: must be plain | deepspeed"),
    ],
)
def test_mistakes_end_with_2_and_one_message(run: Run, arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert says in done.err
    assert "Traceback" not in done.err and "HYDRA_FULL_ERROR" not in done.err
    assert done.out == "" and done.configs == []


def test_groups_cannot_be_chosen_where_the_run_fixed_them(run: Run) -> None:
    done = run("run=somewhere", "target=smollm2", config="evaluate")
    assert done.code == 2
    assert "target.KEY=VALUE" in done.err


def test_help_lists_recipes_groups_and_exit_codes(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for expected in ("recipe=quickstart", "smollm2", "75  interrupted", "--cfg job"):
        assert expected in done.out


def test_a_sweep_runs_its_jobs_in_folders_of_their_own(run: Run) -> None:
    done = run("--multirun", *BASE, "drafter.gamma=3,4")
    assert done.code == 0, done.err
    assert [j["drafter"]["gamma"] for j in done.configs] == [3, 4]
    assert len({j["paths"]["run"] for j in done.configs}) == 2


def test_one_bad_job_does_not_stop_a_sweep_but_shows_in_the_code(run: Run) -> None:
    done = run("--multirun", *BASE, "drafter.gamma=0,2")
    assert done.code == 2
    assert "gamma" in done.err
    assert [j["drafter"]["gamma"] for j in done.configs] == [2]


def test_a_sweep_under_a_launcher_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("--multirun", *BASE, "train.max_steps=1,2")
    assert done.code == 2
    assert "start it without a launcher" in done.err


def raising(error: BaseException) -> Callable[[Any], None]:
    def main(_: Any) -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (Interrupted("saved at step 3"), 75, "saved at step 3"),
        (DataError("a.jsonl:3: no messages"), 2, "a.jsonl:3"),
        (TrainingError("loss is NaN"), 1, "loss is NaN"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1, "the disk is full (runs/x)"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 1, "the disk is full"),
        (KeyboardInterrupt(), 1, "stopped from the keyboard"),
        (ZeroDivisionError("surprise"), 1, "ZeroDivisionError: surprise"),
    ],
)
def test_every_end_has_its_exit_code(run: Run, error: BaseException, code: int, says: str) -> None:
    done = run(*BASE, main=raising(error))
    assert done.code == code
    assert says in done.err.splitlines()[-1]


def test_only_rank_0_names_a_mistake_that_every_rank_finds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for arguments in (["recipe=flsh"], [*BASE, "seed=x"]):
        done = run(*arguments)
        assert (done.code, done.err) == (2, "")
    monkeypatch.setenv("RANK", "0")
    assert "seed=x" in run(*BASE, "seed=x").err


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_what_goes_wrong_inside_the_command_is_said_by_its_rank(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: type[UserError]
) -> None:
    monkeypatch.setenv("RANK", "1")
    done = run(*BASE, main=raising(kind("rank 1 of this machine has no GPU of its own")))
    assert done.code == 2
    assert done.err == "error (rank 1): rank 1 of this machine has no GPU of its own\n"
