"""What a call does, skips, and leaves to the next one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deepspec.comparison.plan import PlannedRun
from deepspec.comparison.state import seconds_spent
from deepspec.comparison.work import Work
from deepspec.errors import Interrupted
from tests.unit.comparison.study import FakeCommands, interrupted, planned, write_status, write_training


@pytest.fixture
def runs(tmp_path: Path) -> list[PlannedRun]:
    return [planned(tmp_path, variant, seed) for seed in (0, 1) for variant in ("a", "b")]


def call(runs: list[PlannedRun], commands: FakeCommands, hours: float = 3.0) -> Work:
    work = Work(runs, commands, hours=hours, clock=commands.clock)
    work.do()
    return work


def test_every_run_once(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    tables: list[int] = []
    Work(runs, commands, hours=3.0, clock=commands.clock).do(after_each=lambda: tables.append(len(commands.calls)))
    assert commands.calls == [(r.name, stage) for r in runs for stage in ("train", "evaluate")]
    assert tables == [2, 4, 6, 8]
    assert [(seconds_spent(r, "train"), seconds_spent(r, "evaluate")) for r in runs] == [(300.0, 60.0)] * 4
    assert all((r.folder / "logs").is_dir() for r in runs)
    assert not call(runs, commands).failures
    assert len(commands.calls) == 8, "a second call does nothing"


def test_what_is_trained_is_only_evaluated(runs: list[PlannedRun]) -> None:
    write_training(runs[1])
    commands = FakeCommands(runs)
    call(runs, commands)
    assert (runs[1].name, "train") not in commands.calls
    assert (runs[1].name, "evaluate") in commands.calls


def test_a_training_with_other_settings_is_done_anew(runs: list[PlannedRun], tmp_path: Path) -> None:
    write_training(planned(tmp_path, "a", 0, lr=0.5))
    commands = FakeCommands(runs)
    call(runs, commands)
    anew = [words[-1] == "train.resume=false" for words in commands.words if words[2] == "deepspec.train"]
    assert anew == [True, False, False, False]


def test_an_interrupted_training_goes_on(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    commands.instead[runs[1].name, "train"] = interrupted
    with pytest.raises(Interrupted, match="SIGTERM"):
        call(runs, commands)
    assert commands.calls[-1] == (runs[1].name, "train")
    assert seconds_spent(runs[1], "train") == 300.0
    commands.instead.clear()
    call(runs, commands)
    assert commands.calls[3:5] == [(runs[1].name, "train"), (runs[1].name, "evaluate")]
    assert "train.resume=false" not in commands.words[3]
    assert seconds_spent(runs[1], "train") == 600.0, "both parts"


def test_a_training_that_someone_else_stopped_stops_the_study(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    commands.instead[runs[0].name, "train"] = lambda run, output: 75
    with pytest.raises(Interrupted, match=r"a-seed0: train was interrupted"):
        call(runs, commands)
    assert len(commands.calls) == 1


def test_a_failure_loses_no_other_run(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)

    def fail(run: PlannedRun, output: Path) -> int:
        write_status(run, "failed", "the gradient was not finite")
        return 1

    def mistake(run: PlannedRun, output: Path) -> int:
        output.write_text("some warning\nerror: data.test=x: no such file\n")
        return 2

    commands.instead[runs[0].name, "train"] = fail
    commands.instead[runs[1].name, "evaluate"] = mistake
    commands.instead[runs[2].name, "train"] = lambda run, output: -9
    commands.instead[runs[3].name, "evaluate"] = lambda run, output: 0
    work = call(runs, commands)
    assert [(f.run, f.stage, f.reason) for f in work.failures] == [
        ("a-seed0", "train", "the gradient was not finite"),
        ("b-seed0", "evaluate", "data.test=x: no such file"),
        ("a-seed1", "train", "killed by SIGKILL"),
        ("b-seed1", "evaluate", "ended well, but what it should have written is not there"),
    ]
    assert work.failed_lines()[0] == "  a-seed0, train: the gradient was not finite"
    commands.instead.clear()
    assert not call(runs, commands).failures, "the next call tries them again"


def test_every_line_of_an_error_is_told(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)

    def mistakes(run: PlannedRun, output: Path) -> int:
        output.write_text("error: an older one\nerror: 2 mistakes in the configuration:\n  - sed: no such key\n  - b\n")
        return 2

    commands.instead[runs[0].name, "evaluate"] = mistakes
    assert call(runs, commands).failures[0].reason == "2 mistakes in the configuration: - sed: no such key - b"


def test_an_old_status_is_no_reason(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    write_status(runs[0], "failed", "of yesterday", time=1.0)

    def refuse(run: PlannedRun, output: Path) -> int:
        output.write_text("error: sed: no such key\n")
        return 2

    commands.instead[runs[0].name, "train"] = refuse
    assert call(runs, commands).failures[0].reason == "sed: no such key"


def test_a_run_that_would_not_fit_is_not_begun(runs: list[PlannedRun], caplog: pytest.LogCaptureFixture) -> None:
    """6 minutes a run: the third would end after 18, and there are 17."""
    commands = FakeCommands(runs)
    with caplog.at_level(logging.INFO), pytest.raises(Interrupted) as stopped:
        call(runs, commands, hours=17 / 60)
    assert len(commands.calls) == 4
    assert "12 of 17 min (study.hours=0.283333) are gone and a-seed1 would not fit, about 6 min" in str(stopped.value)
    assert "2 of 4 runs are finished" in str(stopped.value)
    assert "b-seed0, about 6 min by the finished ones; 1 of 4 runs are finished, 6 of 17 min gone" in caplog.text
    call(runs, commands, hours=17 / 60)
    assert len(commands.calls) == 8, "each call has the time anew"


def test_the_first_run_begins_whatever_the_time(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    with pytest.raises(Interrupted):
        call(runs, commands, hours=0.01)
    assert len(commands.calls) == 2


def test_only_what_is_left_of_a_run_has_to_fit(runs: list[PlannedRun]) -> None:
    """5 minutes a training and 1 an evaluation. b is trained, so 2 minutes are enough for it."""
    write_training(runs[1])
    commands = FakeCommands(runs)
    with pytest.raises(Interrupted, match=r"a-seed1 would not fit, about 6 min"):
        call(runs, commands, hours=8 / 60)
    assert commands.calls == [(runs[0].name, "train"), (runs[0].name, "evaluate"), (runs[1].name, "evaluate")]


def test_what_an_interrupted_training_took_is_not_asked_for_again(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    commands.instead[runs[1].name, "train"] = interrupted
    commands.took["train"] = 240.0
    with pytest.raises(Interrupted):
        call(runs, commands)
    commands.instead.clear()
    with pytest.raises(Interrupted, match=r"a-seed1 would not fit, about 5 min"):
        call(runs, commands, hours=9 / 60)
    assert commands.calls[-1] == (runs[1].name, "evaluate"), "1 minute was left, 5 were taken"


def test_a_failure_does_not_count_as_a_runs_time(runs: list[PlannedRun]) -> None:
    commands = FakeCommands(runs)
    commands.instead[runs[0].name, "train"] = lambda run, output: 1
    commands.took["train"] = 3600.0
    call(runs[:1], commands)
    commands.instead.clear()
    commands.took["train"] = 60.0
    call(runs[:1], commands)
    assert seconds_spent(runs[0], "train") == 60.0


def test_a_variant_is_expected_to_take_what_its_own_runs_took(runs: list[PlannedRun]) -> None:
    """a takes 60 minutes and b 1: a second b fits where a second a does not."""
    commands = FakeCommands(runs)
    order = [runs[0], runs[1], runs[3], runs[2]]

    def slow(run: PlannedRun, output: Path) -> int:
        commands.now += 3300.0
        write_training(run)
        return 0

    commands.instead[runs[0].name, "train"] = slow
    commands.took = {"train": 30.0, "evaluate": 30.0}
    with pytest.raises(Interrupted, match=r"a-seed1 would not fit, about 56 min"):
        call(order, commands, hours=1.88)
    assert [name for name, stage in commands.calls if stage == "train"] == ["a-seed0", "b-seed0", "b-seed1"]
