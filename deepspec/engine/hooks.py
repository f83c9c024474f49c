"""The hooks of a training run: stop on a signal, write metrics, validate, save."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import torch

from deepspec.contracts import Ratio
from deepspec.engine.meters import RatioMeters, peak_memory_gib
from deepspec.engine.signals import STOPPING
from deepspec.errors import TrainingError
from deepspec.log import get_logger, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from deepspec.checkpoint.store import CheckpointStore
    from deepspec.contracts import Batch
    from deepspec.engine.loop import Trainer
    from deepspec.engine.meters import Value
    from deepspec.engine.tracker import Tracker

log = get_logger(__name__)


class SignalHook:
    """On SIGTERM or SIGINT the step in hand is finished and saved; a second SIGINT ends the program at once."""

    def __init__(self) -> None:
        self._received = ""
        self._previous: dict[int, Any] = {}

    def start(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Take over both signals."""
        for number in STOPPING:
            self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def after_step(self, trainer: Trainer) -> None:
        """Pass the request on to the loop, which asks all ranks."""
        if self._received:
            trainer.stop_reason = f"received {self._received}"

    def finish(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Give the signals back, unless one was received.

        When the first rank leaves, a launcher sends SIGTERM to the others, which may still have to write status.json.
        """
        if self._received:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class SaveHook:
    """Writes a checkpoint every ``every`` steps and at the end; a failure on the first rank fails every rank."""

    def __init__(self, store: CheckpointStore, every: int | None) -> None:
        self._store, self._every = store, every
        self._saved = -1

    def start(self, trainer: Trainer) -> None:
        """A checkpoint that was resumed from need not be written again."""
        self._saved = trainer.progress.step

    def after_step(self, trainer: Trainer) -> None:
        """Save when it is time."""
        if self._every and trainer.progress.step % self._every == 0:
            self._save(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Save the last state."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if step == self._saved:
            return
        trainer.read_counters()
        ranks = trainer.engine.ranks
        state = trainer.engine.export_state()
        error: TrainingError | None = None
        if ranks.is_first:
            try:
                path = self._store.save(state, trainer.progress)
                log.info("saved %s", path)
            except TrainingError as problem:
                error = problem
        if ranks.any(error is not None):
            raise error or TrainingError("the first rank could not write its checkpoint; see its message")
        self._saved = step


class LogHook:
    """Writes a line of training metrics every ``every`` steps."""

    def __init__(self, tracker: Tracker, *, every: int, peak_lr: float) -> None:
        self._tracker, self._every, self._peak_lr = tracker, every, peak_lr
        self._since, self._first_step = 0.0, 0

    def start(self, trainer: Trainer) -> None:
        """Drop lines past the step that the run goes on from."""
        self._tracker.resume(trainer.progress.step)
        self._since, self._first_step = time.monotonic(), trainer.progress.step

    def after_step(self, trainer: Trainer) -> None:
        """Write when it is time."""
        if trainer.progress.step % self._every == 0 or trainer.progress.step == trainer.limits.total_steps:
            self._write(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Write what is left and close."""
        if trainer.progress.step > self._first_step:
            self._write(trainer)
        self._tracker.close()

    def _write(self, trainer: Trainer) -> None:
        now = time.monotonic()
        seconds, steps = max(now - self._since, 1e-9), trainer.progress.step - self._first_step
        tokens = trainer.read_tokens()
        means = trainer.meters.reduce(trainer.engine.ranks)
        metrics: dict[str, Any] = {"epoch": trainer.progress.epoch, "samples": trainer.progress.samples}
        metrics |= {"loss": total_loss(means, trainer.drafter.coefficients), **means}
        metrics["lr"] = self._peak_lr * trainer.lr_factor
        if trainer.last_step is not None:
            metrics["grad_norm"] = trainer.last_step.grad_norm.item()
            metrics["loss_scale"] = trainer.last_step.loss_scale.item()
        metrics["skipped_steps"] = trainer.progress.skipped_steps
        metrics["tokens_per_s"] = tokens / seconds
        metrics["train_seconds"] = trainer.progress.seconds
        metrics["memory_gib"] = peak_memory_gib(trainer.engine.ranks.device)
        metrics["step_seconds"] = seconds / max(1, steps)
        metrics |= {f"seconds/{part}": value / max(1, steps) for part, value in trainer.stopwatch.read().items()}
        self._tracker.write(trainer.progress.step, "train", metrics)
        log.info("step %d/%d  %s", trainer.progress.step, trainer.limits.total_steps, summary(metrics))
        self._since, self._first_step = now, trainer.progress.step


class ValidateHook:
    """Runs the objective over the validation batches every ``every`` steps, without a gradient.

    Every rank has to get the same number of batches, since ZeRO-3 gathers parameters in each forward pass.
    """

    def __init__(self, tracker: Tracker, batches: Callable[[], Iterable[Batch]], every: int) -> None:
        self._tracker, self._batches, self._every = tracker, batches, every

    def start(self, trainer: Trainer) -> None:
        """Nothing to prepare."""

    def after_step(self, trainer: Trainer) -> None:
        """Validate when it is time."""
        if trainer.progress.step % self._every == 0 or trainer.progress.step == trainer.limits.total_steps:
            self._validate(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Nothing to end."""

    def _validate(self, trainer: Trainer) -> None:
        meters = RatioMeters()
        with torch.no_grad():
            for batch in self._batches():
                moved = batch.to(trainer.engine.ranks.device)
                output = trainer.engine.module(moved, trainer.features(moved))
                weights = trainer.drafter.denominators(moved)
                for name, value in output.sums.items():
                    meters.add(f"loss/{name}", Ratio(value, weights[name]))
                for name, ratio in output.metrics.items():
                    meters.add(name, ratio)
        means = meters.reduce(trainer.engine.ranks)
        metrics = {"loss": total_loss(means, trainer.drafter.coefficients), **means}
        self._tracker.write(trainer.progress.step, "validation", metrics)
        log.info("validation at step %d  %s", trainer.progress.step, summary(metrics))


class ProgressHook:
    """A bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar: Iterator[int] | None = None

    def start(self, trainer: Trainer) -> None:
        """Count from the step that the run goes on from."""
        left = trainer.limits.total_steps - trainer.progress.step
        self._bar = progress(range(left), left, "training")
        next(self._bar, None)

    def after_step(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Move on by one."""
        if self._bar is not None:
            next(self._bar, None)

    def finish(self, trainer: Trainer) -> None:  # noqa: ARG002
        """Leave the line as it is."""
        self._bar = None


def total_loss(means: dict[str, Value], coefficients: Any) -> float:
    """Return the loss that the optimiser sees: the terms' means times their coefficients."""
    values = {name: means.get(f"loss/{name}") for name in coefficients}
    return sum(coefficients[n] * v for n, v in values.items() if isinstance(v, float))


def summary(metrics: dict[str, Any]) -> str:
    """Return the numbers a person looks at first."""
    shown = ("loss", "expected_length", "lr", "grad_norm", "tokens_per_s")
    return "  ".join(f"{n} {metrics[n]:.4g}" for n in shown if isinstance(metrics.get(n), float))
