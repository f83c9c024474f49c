"""The loop: skipped steps, terms without weight, the loader's own errors, signals, precision, exact resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspec.checkpoint.store import Checkpoint
from deepspec.contracts import Batch, Features, LossOutput
from deepspec.engine import loop
from deepspec.engine.hooks import LogHook, SaveHook, SignalHook, ValidateHook
from deepspec.engine.loop import Hook, Trainer, normalised_loss
from deepspec.engine.tracker import JsonLines
from deepspec.errors import ConfigError, DataError, Interrupted, TrainingError
from tests.unit.engine import toy


class Overflowing(toy.ToyDrafter):
    """Meets a hidden state of 7e4, which fp16 cannot hold, in its second step."""

    calls = 0

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        self.calls += 1
        hidden = features.hidden * 7e4 if self.calls == 2 else features.hidden
        return super().forward(batch, Features(hidden, features.last_hidden))


def overflowing() -> Overflowing:
    drafter = Overflowing(toy.ToyConfig(), toy.INFO, (1, 2), 3)
    drafter.load_state_dict(toy.make_drafter().state_dict())
    return drafter


class BrokenDrafter(toy.ToyDrafter):
    """Every gradient is NaN."""

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        output = super().forward(batch, features)
        return LossOutput({name: value * float("nan") for name, value in output.sums.items()})


def test_the_seconds_of_all_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those spent on the first weights too; a part that goes on starts from what its checkpoint says."""
    ticks = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    first = toy.make_trainer(steps=2, seconds=100.0)
    first.run()
    assert first.progress.seconds == 102.0
    second = toy.make_trainer(steps=3)
    state = first.engine.export_state()
    second.resume(Checkpoint(Path(), state, replace(first.progress, seconds=500.0)))
    second.run()
    assert second.progress.step == 3
    assert second.progress.seconds == 501.0


def parameters(trainer: Trainer) -> torch.Tensor:
    return toy.flat(dict(trainer.engine.export_state().parameters))


def test_fp16_overflow_is_skipped_and_counted() -> None:
    engine = toy.engine_config(precision="fp16", initial_loss_scale=64.0)
    trainer = toy.make_trainer(steps=4, engine=engine, drafter=overflowing())
    progress = trainer.run()
    assert (progress.step, progress.skipped_steps, progress.bad_steps_in_a_row) == (4, 1, 0)
    state = trainer.engine.export_state()
    assert state.optimizer_step == 3
    assert state.loss_scale["scale"] == 32.0
    assert parameters(trainer).isfinite().all()


def test_too_many_bad_steps() -> None:
    broken = BrokenDrafter(toy.ToyConfig(), toy.INFO, (1, 2), 3)
    trainer = toy.make_trainer(drafter=broken, max_bad_steps=3)
    with pytest.raises(TrainingError, match=r"3 steps in a row up to step 3 \(train\.max_bad_steps\)"):
        trainer.run()


def test_low_precision_follows_fp32() -> None:
    runs = {p: toy.make_trainer(engine=toy.engine_config(precision=p)) for p in ("fp32", "bf16", "fp16")}
    for trainer in runs.values():
        trainer.run()
    for precision in ("bf16", "fp16"):
        assert toy.relative(parameters(runs[precision]), parameters(runs["fp32"])) < 2e-2
        assert {p.dtype for p in runs[precision].drafter.parameters()} == {torch.float32}


def test_term_without_weight_in_the_whole_step() -> None:
    value = torch.tensor(3.0, requires_grad=True)
    empty = torch.tensor(0.0, requires_grad=True)
    totals = {"a": torch.tensor(6.0), "b": torch.tensor(0.0)}
    loss = normalised_loss({"a": value, "b": empty * 2.0}, {"a": 2.0, "b": 1.0}, totals)
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    assert value.grad is not None
    assert value.grad.item() == pytest.approx(1 / 3)
    assert empty.grad is not None
    assert empty.grad.item() == 0.0


def test_step_without_any_supervised_token() -> None:
    """0/0 neither appears in the loss nor moves a weight that has no gradient."""
    trainer = toy.make_trainer(steps=2, optim=replace(toy.OPTIM, weight_decay=0.0))
    trainer._batches = lambda start: iter([(s, [toy.make_batch([0, 4, 8, 12])]) for s in range(start, 2)])
    before = parameters(trainer)
    trainer.run()
    assert trainer.progress.skipped_steps == 0
    assert parameters(trainer).equal(before)


def test_a_micro_batch_without_any_supervised_token_is_as_if_absent() -> None:
    """Every fourth sample of the toy supervises nothing: [0, 4, 8] weigh nothing beside [2, 3]."""
    found = []
    for chunks in ([[0, 4], [2, 3], [8]], [[2, 3]]):
        trainer = toy.make_trainer(steps=3, optim=replace(toy.OPTIM, clip_norm=0.3))
        made = [toy.make_batch(chunk) for chunk in chunks]
        for step in range(3):
            trainer.train_step(step, made)
        assert trainer.progress.skipped_steps == 0
        assert trainer.last_step is not None
        found.append((parameters(trainer), trainer.last_step.grad_norm))
    (weights, norm), (expected, reference) = found
    assert weights.isfinite().all()
    assert weights.equal(expected)
    assert norm.equal(reference)


def failing_batches(start: int) -> Iterator[tuple[int, list[Batch]]]:
    yield from ((step, [toy.make_batch(range(4))]) for step in range(start, 3))
    raise DataError("line 4: not JSON")


def test_loader_error_stops_the_run() -> None:
    """No stale batch is trained on after the loader failed."""
    trainer = toy.make_trainer(steps=10)
    trainer._batches = failing_batches
    with pytest.raises(DataError, match="line 4"):
        trainer.run()
    assert trainer.progress.step == 3


def test_data_that_ends_too_early() -> None:
    trainer = toy.make_trainer(steps=10)
    trainer._batches = lambda _start: iter([(0, [toy.make_batch(range(4))])])
    with pytest.raises(TrainingError, match="step 1 of 10"):
        trainer.run()


class SendSignal:
    """Sends this process a signal in step 3."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def start(self, trainer: Trainer) -> None: ...

    def after_step(self, trainer: Trainer) -> None:
        if trainer.progress.step == 3:
            os.kill(os.getpid(), self.number)

    def finish(self, trainer: Trainer) -> None: ...


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_a_resumed_run_is_the_same(tmp_path: Path, number: signal.Signals) -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    straight = toy.make_trainer(steps=6)
    straight.run()
    drafter = toy.make_drafter()
    store = toy.make_store(tmp_path / "checkpoints", drafter)
    hooks: list[Hook] = [SendSignal(number), SaveHook(store, None), SignalHook()]
    trainer = toy.make_trainer(steps=6, drafter=drafter, hooks=hooks)
    try:
        with pytest.raises(Interrupted, match=f"step 3: received {number.name}") as stop:
            trainer.run()
        os.kill(os.getpid(), signal.SIGTERM)  # what a launcher does when another rank has left already
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert stop.value.exit_code == 75
    resumed = toy.make_trainer(steps=6)
    resumed.resume(store.load(store.newest() or ""))
    assert resumed.progress.step == 3
    resumed.run()
    assert parameters(resumed).equal(parameters(straight))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resume_under_muon(tmp_path: Path, precision: str) -> None:
    optim = replace(toy.OPTIM, name="muon")
    config = toy.engine_config(precision=precision, initial_loss_scale=64.0)
    straight = toy.make_trainer(steps=6, optim=optim, engine=config)
    straight.run()
    first = toy.make_trainer(steps=3, optim=optim, engine=config)
    first.run()
    store = toy.make_store(tmp_path, first.drafter)
    store.save(first.engine.export_state(), first.progress)
    resumed = toy.make_trainer(steps=6, optim=optim, engine=config)
    resumed.resume(store.load("step-000003"))
    resumed.run()
    assert parameters(resumed).equal(parameters(straight))
    with pytest.raises(ConfigError, match=r"optim\.name differs"):
        toy.make_trainer(steps=6).resume(store.load("step-000003"))


def test_metrics_and_validation(tmp_path: Path) -> None:
    import json

    tracker = JsonLines(tmp_path / "metrics.jsonl")
    hooks: list[Hook] = [
        ValidateHook(tracker, lambda: iter([toy.make_batch([3, 7]), toy.make_batch([2])]), 2),
        LogHook(tracker, every=2, peak_lr=toy.OPTIM.lr),
    ]
    toy.make_trainer(steps=3, hooks=hooks, engine=toy.engine_config(micro_batch_size=2)).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("validation", 2), ("train", 2), ("validation", 3), ("train", 3)
    ]  # fmt: skip
    train = lines[1]
    expected = {"loss", "loss/square", "loss/rare", "acceptance", "expected_length", "lr", "grad_norm", "tokens_per_s"}
    expected |= {"memory_gib", "seconds/data", "seconds/target", "seconds/draft", "seconds/optimiser", "step_seconds"}
    assert expected <= train.keys()
    assert len(train["acceptance"]) == 2
    assert train["loss"] == pytest.approx(0.7 * train["loss/square"] + 1.3 * (train["loss/rare"] or 0.0))
    assert train["lr"] == pytest.approx(toy.OPTIM.lr / 2)
    assert train["samples"] == 2 * toy.GLOBAL_BATCH
