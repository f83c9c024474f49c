"""The command line: exit codes, one clear message, launchers, sweeps, and no torch."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest

from deepspec.config.arguments import groups_of, parse
from deepspec.config.cli import report
from deepspec.config.compose import CONF
from deepspec.errors import ConfigError, DataError, Interrupted, TrainingError
from tests.config.conftest import Run

BASE = ("recipe=flash", "target=smollm2", "data=jsonl", "data.path=train.jsonl")


def test_cfg_job_shows_every_key_without_torch_and_quickly(run: Run) -> None:
    took = []
    for _ in range(2):
        start = time.perf_counter()
        done = run("--cfg", "job", "recipe=flash")
        took.append(time.perf_counter() - start)
    assert done.returncode == 0, done.stderr
    assert "micro_batch_size: 1" in done.stdout and "max_bad_steps: 20" in done.stdout
    assert "path: ???" in done.stdout
    resolved = run("--cfg", "job", "--resolve", "recipe=quickstart").stdout
    assert "run: runs/quickstart-smollm2" in resolved


def test_a_command_gets_dataclasses_and_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    done = run(*BASE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"]["train"] == "train.jsonl"
    assert {p.name for p in tmp_path.iterdir()} == {"program.py", "toypkg.py", "train.jsonl"}


@pytest.mark.parametrize("flag", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]])
def test_launchers_may_append_the_local_rank(flag: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = parse([*BASE, *flag], groups_of(CONF))
    assert not [word for word in made.hydra if "rank" in word]


def test_an_outside_drafter_needs_no_change_of_the_package(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    done = run(*BASE, "drafter._target_=toypkg.ToyConfig", "~drafter.num_layers", "~drafter.gamma",
               "~drafter.sliding_window", "~drafter.markov_rank")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["drafter"] == {"_target_": "toypkg.ToyConfig", "gamma": 3, "width": 8}


def test_an_outside_drafter_with_its_own_group_and_recipe(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    for folder in ("drafter", "recipe"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
    (tmp_path / "mine/drafter/toy.yaml").write_text("_target_: toypkg.ToyConfig\nwidth: 4\n")
    (tmp_path / "mine/recipe/toy.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /drafter: toy\n  - override /target: smollm2\n"
    )
    arguments = ("--config-dir", "mine", "recipe=toy", "data.path=train.jsonl")
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["drafter"] == {"_target_": "toypkg.ToyConfig", "gamma": 3, "width": 4}
    wrong = run(*arguments, "drafter.width=5", "drafter.wdth=4")
    assert wrong.returncode == 2
    assert "drafter.width=5: must be even" in wrong.stderr
    assert "drafter.wdth: no such key; did you mean drafter.width?" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["recipe=flsh"], "recipe=flsh: no such choice; did you mean flash?"),
        ([], "recipe: must be given"),
        (["quickstart"], "did you mean recipe=quickstart?"),
        (["--epochs", "3"], "settings are written epochs=VALUE"),
        (["recipe=flash", "target=smollm"], "target=smollm: no such choice; did you mean smollm2?"),
        (["recipe=flash", "train.max_steps=1,2"], "need --multirun"),
        (["recipe=flash", "train.max_steps=[1"], "train.max_steps=[1"),
        (["recipe=flash", "data.pth=x", "+optim.lrr=1"], "2 mistakes" if False else "optim.lrr: no such key"),
    ],
)
def test_mistakes_end_with_2_and_one_message(run: Run, arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr and "HYDRA_FULL_ERROR" not in done.stderr
    assert done.stdout == ""


def test_groups_cannot_be_chosen_where_the_run_fixed_them(run: Run) -> None:
    done = run("run=somewhere", "target=smollm2", config="evaluate")
    assert done.returncode == 2
    assert "target.KEY=VALUE" in done.stderr


def test_help_lists_recipes_groups_and_exit_codes(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for expected in ("Print what was resolved.", "recipe=quickstart", "smollm2", "75  interrupted", "--cfg job"):
        assert expected in done.stdout


def test_a_sweep_runs_its_jobs_in_folders_of_their_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    done = run("--multirun", *BASE, "train.max_steps=1,2", "drafter.gamma=3,4")
    assert done.returncode == 0, done.stderr
    jobs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(j["train"]["max_steps"], j["drafter"]["gamma"]) for j in jobs] == [(1, 3), (1, 4), (2, 3), (2, 4)]
    assert len({j["paths"]["run"] for j in jobs}) == 4


def test_one_bad_job_does_not_stop_a_sweep_but_shows_in_the_code(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    done = run("--multirun", *BASE, "drafter.gamma=0,2")
    assert done.returncode == 2
    assert "gamma" in done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == 1


def test_a_sweep_under_a_launcher_is_refused(run: Run) -> None:
    done = run("--multirun", *BASE, "train.max_steps=1,2", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "start it without a launcher" in done.stderr


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("from deepspec.errors import Interrupted; raise Interrupted('saved at step 3')", 75, "saved at step 3"),
        ("from deepspec.errors import DataError; raise DataError('a.jsonl:3: no messages')", 2, "a.jsonl:3"),
        ("from deepspec.errors import TrainingError; raise TrainingError('loss is NaN')", 1, "loss is NaN"),
        ("raise OSError(28, 'No space left on device', 'runs/x')", 1, "the disk is full (runs/x)"),
        ("raise KeyboardInterrupt", 1, "stopped from the keyboard"),
        ("raise ZeroDivisionError('surprise')", 1, "ZeroDivisionError: surprise"),
    ],
)
def test_every_end_has_its_exit_code(run: Run, tmp_path: Path, body: str, code: int, says: str) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    done = run(*BASE, body=body)
    assert done.returncode == code
    assert says in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == ("ZeroDivision" in body)


def test_only_rank_0_repeats_a_config_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert report(ConfigError("seed=x: must be a whole number")) == 2
    assert capsys.readouterr().err == ""
    assert report(DataError("gone")) == 2
    assert capsys.readouterr().err == "error (rank 1): gone\n"


def test_report_codes() -> None:
    assert report(Interrupted("saved")) == 75
    assert report(TrainingError("no")) == 1
    assert report(OSError(errno.ENOSPC, "full")) == 1
