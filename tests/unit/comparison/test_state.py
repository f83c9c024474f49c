"""Which runs are finished, with which settings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import yaml

from deepspec.comparison.state import is_complete, is_trained, must_start_anew, seconds_spent, write_seconds
from deepspec.config.compose import compose_run
from deepspec.config.resolve import to_plain
from tests.unit.comparison.study import planned, write_evaluation, write_status, write_training


def test_from_nothing_to_complete(tmp_path: Path) -> None:
    run = planned(tmp_path)
    assert not is_trained(run) and not is_complete(run) and not must_start_anew(run)
    write_training(run)
    assert is_trained(run) and not is_complete(run)
    write_evaluation(run)
    assert is_complete(run)


def test_only_a_finished_training_counts(tmp_path: Path) -> None:
    run = planned(tmp_path)
    write_training(run)
    for status in ("running", "interrupted", "failed"):
        write_status(run, status)
        assert not is_trained(run) and not must_start_anew(run), status
    write_status(run, "finished")
    (run.folder / "checkpoints" / "latest").unlink()
    assert not is_trained(run)


def test_other_settings_of_the_training_ask_for_another(tmp_path: Path) -> None:
    write_training(planned(tmp_path, lr=0.2))
    write_evaluation(planned(tmp_path, lr=0.2))
    assert must_start_anew(planned(tmp_path))
    assert not is_trained(planned(tmp_path)) and not is_complete(planned(tmp_path))


def test_other_settings_of_the_evaluation_ask_for_that_alone(tmp_path: Path) -> None:
    run, other = planned(tmp_path), planned(tmp_path, evaluate={"limit": 3, "max_new_tokens": 8})
    write_training(run)
    write_evaluation(run)
    assert is_trained(other) and not is_complete(other)
    run.config["data"]["test"] = "other.jsonl"
    run.config["train"]["resume"] = False
    assert is_trained(run) and not is_complete(run)


def test_an_evaluation_belongs_to_its_checkpoint(tmp_path: Path) -> None:
    run = planned(tmp_path)
    write_training(run)
    write_evaluation(run)
    write_training(run, step=8)
    assert not is_complete(run), "of the checkpoint before"
    write_evaluation(run)
    assert is_complete(run)
    later = (run.folder / "evaluation" / "report.json").stat().st_mtime + 60
    os.utime(run.folder / "checkpoints" / "step-000008" / "state.json", (later, later))
    assert not is_complete(run), "trained anew to the same step"


def test_files_that_cannot_be_read_are_as_good_as_missing(tmp_path: Path) -> None:
    run = planned(tmp_path)
    write_training(run)
    write_evaluation(run)
    (run.folder / "evaluation" / "report.json").write_text('{"scores": ')
    assert is_trained(run) and not is_complete(run)
    (run.folder / "config.yaml").write_text("[1, 2")
    assert not is_trained(run) and not must_start_anew(run)


def test_seconds(tmp_path: Path) -> None:
    run = planned(tmp_path)
    assert seconds_spent(run, "train") == 0.0
    run.folder.mkdir()
    write_seconds(run, "train", 12.5)
    write_seconds(run, "evaluate", 3.0)
    assert (seconds_spent(run, "train"), seconds_spent(run, "evaluate")) == (12.5, 3.0)


def test_a_key_that_was_added_since_asks_for_no_other_training(tmp_path: Path) -> None:
    """The stored settings lack a key of the schema whose default is wanted."""
    words = ("recipe=quickstart", f"paths.run={tmp_path}")
    wanted, other = (to_plain(compose_run([*words, *more])) for more in ((), ("engine.attention=eager",)))
    run = replace(planned(tmp_path), folder=tmp_path, config=wanted)
    write_training(run)
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del stored["engine"]["attention"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    assert not must_start_anew(run)
    assert must_start_anew(replace(run, config=other))
