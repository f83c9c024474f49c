"""Metric files, W&B offline with the real library, status.json, and signals outside of steps."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from deepspec.config.schema import TrackerConfig
from deepspec.contracts import Ratio
from deepspec.engine.build import attention_backend
from deepspec.engine.distributed import choose_device
from deepspec.engine.meters import RatioMeters
from deepspec.engine.signals import STOPPING, stoppable
from deepspec.engine.status import recorded_status
from deepspec.engine.tracker import JsonLines, make_tracker
from deepspec.errors import ConfigError, DataError, Interrupted, TrainingError
from tests.unit.engine import toy


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_resume_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLines(path)
    for step in (2, 4, 6):
        tracker.write(step, "train", {"loss": float("nan") if step == 2 else 1.0, "acceptance": [0.5, float("inf")]})
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    tracker.resume(4)
    tracker.write(5, "train", {"loss": 1.0})
    assert steps(path) == [2, 4, 5]
    first = json.loads(path.read_text().splitlines()[0])
    assert first["loss"] is None
    assert first["acceptance"] == [0.5, None]


def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = TrackerConfig(name="wandb", mode="offline", project="toy", tags=("a",))
    for start in (0, 2):
        tracker = make_tracker(tmp_path, config, {"seed": 0, "drafter": {"gamma": 2}}, is_first=True)
        tracker.resume(start)
        tracker.write(start + 2, "train", {"loss": 1.0, "acceptance": [0.5, 0.25], "nothing": None})
        tracker.close()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert runs
    identity = (tmp_path / "wandb-id.txt").read_text().strip()
    assert all(run.name.endswith(identity) for run in runs), "a resumed run goes on under the same id"
    assert steps(tmp_path / "metrics.jsonl") == [2, 4]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path, TrackerConfig(), {}, is_first=False)
    tracker.write(1, "train", {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, "finished", 0),
        (Interrupted("stopped after step 3"), "interrupted", 75),
        (TrainingError("the disk is full"), "failed", 1),
        (DataError("line 3"), "failed", 2),
        (ValueError("odd"), "failed", 1),
    ],
)
def test_status(tmp_path: Path, error: Exception | None, status: str, code: int) -> None:
    path = tmp_path / "run" / "status.json"
    if error is None:
        with recorded_status(tmp_path / "run"):
            assert json.loads(path.read_text())["status"] == "running"
    else:
        with pytest.raises(type(error)), recorded_status(tmp_path / "run"):
            raise error
    found = json.loads(path.read_text())
    assert (found["status"], found["exit_code"]) == (status, code)
    assert error is None or str(error) in found["reason"]


def test_first_failure_of_a_start_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, message in (("1", "line 3"), ("0", "connection closed by peer")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(DataError), recorded_status(tmp_path):
            raise DataError(message)
        if rank == "1":
            assert json.loads((tmp_path / "status.json").read_text())["reason"] == "rank 1: line 3"


def test_the_first_end_of_any_rank_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher sends SIGTERM to the others when one has failed; when one was stopped, the others lose it."""
    with pytest.raises(Interrupted), recorded_status(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(DataError), recorded_status(tmp_path):
            raise DataError("line 3")
        monkeypatch.setenv("RANK", "0")
        raise Interrupted("received SIGTERM")
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == "rank 1: line 3"
    with pytest.raises(Interrupted), recorded_status(tmp_path):
        raise Interrupted("received SIGTERM")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TrainingError), recorded_status(tmp_path):
        raise TrainingError("connection closed by peer")
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "interrupted"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Give the signals back after a test."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", STOPPING)
def test_signal_outside_of_steps(tmp_path: Path, number: signal.Signals) -> None:
    """Code that catches every Exception does not swallow it, and a launcher's SIGTERM that follows changes nothing."""
    with pytest.raises(Interrupted, match=f"received {number.name}"), recorded_status(tmp_path), stoppable():
        with suppress(Exception):
            os.kill(os.getpid(), number)
            time.sleep(1)
        raise DataError("the signal was swallowed")
    os.kill(os.getpid(), signal.SIGTERM)
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["status"], found["exit_code"]) == ("interrupted", 75)


def test_signals_are_given_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    with stoppable():
        assert [signal.getsignal(number) for number in STOPPING] != before
    assert [signal.getsignal(number) for number in STOPPING] == before


def test_meters_divide_once() -> None:
    meters = RatioMeters()
    for numerator, denominator in ((1.0, 1.0), (9.0, 3.0)):
        vector = torch.tensor([numerator, 0.0])
        meters.add("a", Ratio(torch.tensor(numerator), torch.tensor(denominator)))
        meters.add("b", Ratio(vector, torch.tensor([denominator, 0.0])))
    found = meters.reduce(toy.ONE_RANK)
    assert found["a"] == pytest.approx(2.5)
    assert isinstance(found["b"], list)
    assert found["b"][0] == pytest.approx(2.5)
    assert meters.reduce(toy.ONE_RANK) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device() -> None:
    assert choose_device("auto", 0).type == "cpu"
    with pytest.raises(ConfigError, match=r"engine\.device=cuda"):
        choose_device("cuda", 0)


def test_attention_without_a_backward_pass_is_refused() -> None:
    assert attention_backend("auto", torch.device("cpu")) == "auto"
    assert attention_backend("flex", torch.device("cuda")) == "flex"
    with pytest.raises(ConfigError, match=r"engine\.attention=flex.*auto, sdpa or eager"):
        attention_backend("flex", torch.device("cpu"))
