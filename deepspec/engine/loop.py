"""The training loop. It knows batches, a drafter, an engine and hooks, and owns normalisation.

One optimiser step: the micro-batches of this rank are read, their denominators summed over micro-batches and ranks, and
each micro-batch's loss is ``sum_t coefficient_t * sum_t / denominator_t``. So the same samples give the same gradient
however they are split.

On CUDA the host waits for the device in every micro-batch, where a size or a choice depends on the data: whether rows
are packed (``Target.features``), how many tokens a remembered sample has and whether they are the known ones
(``RememberedFeatures``), how many rows an objective scores, and how its loss cuts them into chunks. The loop itself
waits only where it writes a line of metrics or looks for skipped steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from deepspec.checkpoint.state import Progress
from deepspec.contracts import Ratio
from deepspec.engine.meters import RatioMeters, Stopwatch
from deepspec.errors import Interrupted, TrainingError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deepspec.checkpoint.store import Checkpoint
    from deepspec.contracts import Batch, Features
    from deepspec.drafters.base import Drafter
    from deepspec.engine.base import Engine, StepInfo

log = get_logger(__name__)


class Hook(Protocol):
    """Something that happens beside the steps. Hooks run on every rank, in the order they are given."""

    def start(self, trainer: Trainer) -> None:
        """Before the first step, after a resume."""
        ...

    def after_step(self, trainer: Trainer) -> None:
        """After each optimiser step."""
        ...

    def finish(self, trainer: Trainer) -> None:
        """When the run is over or was asked to stop; not after a failure."""
        ...


@dataclass(frozen=True)
class Limits:
    """The numbers the loop itself needs."""

    total_steps: int
    steps_per_epoch: int
    global_batch_size: int
    check_every: int  # steps between looks at the device for skipped steps
    max_bad_steps: int


class Trainer:
    """Runs optimiser steps until the batches end."""

    def __init__(
        self,
        *,
        drafter: Drafter,
        engine: Engine,
        batches: Callable[[int], Iterable[tuple[int, Sequence[Batch]]]],
        features: Callable[[Batch], Features],
        schedule: Callable[[int], float],
        limits: Limits,
        hooks: Sequence[Hook] = (),
        seconds: float = 0.0,
    ) -> None:
        """``seconds`` were spent on the first weights: they count as training."""
        self.drafter, self.engine = drafter, engine
        self.features, self.schedule, self.limits = features, schedule, limits
        self.progress = Progress(seconds=seconds)
        self.meters, self.stopwatch = RatioMeters(), Stopwatch(engine.ranks.device)
        self.last_step: StepInfo | None = None
        self.lr_factor = 0.0
        self.stop_reason = ""
        """Set by a hook (on any rank) to end the run after the step in hand."""
        self._batches, self._hooks = batches, list(hooks)
        self._clock = time.monotonic()
        device = engine.ranks.device
        self._bad_in_a_row = torch.zeros((), device=device)
        self._skipped = torch.zeros((), device=device)
        self._tokens = torch.zeros((), device=device, dtype=torch.int64)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint."""
        self.engine.import_state(checkpoint.state)
        self.progress = checkpoint.progress
        self._bad_in_a_row.fill_(checkpoint.progress.bad_steps_in_a_row)
        self._skipped.fill_(checkpoint.progress.skipped_steps)

    def run(self) -> Progress:
        """Train to the end.

        Raises:
            Interrupted: a hook asked to stop on some rank; the hooks' ``finish`` has run on all of them.
            TrainingError: the gradient stayed non-finite, or the batches ended too early.
        """
        for hook in self._hooks:
            hook.start(self)
        self._clock = time.monotonic()
        batches = iter(self._batches(self.progress.step))
        while self.progress.step < self.limits.total_steps:
            with self.stopwatch.part("data"):
                step, micro_batches = self._next(batches)
            self.train_step(step, micro_batches)
            for hook in self._hooks:
                hook.after_step(self)
            if self.engine.ranks.any(bool(self.stop_reason)):
                self._finish()
                reason = self.stop_reason or "another rank was asked to stop"
                raise Interrupted(f"stopped after step {self.progress.step}: {reason}; run the same command to go on")
        self._finish()
        return self.progress

    def _next(self, batches: Iterable[tuple[int, Sequence[Batch]]]) -> tuple[int, Sequence[Batch]]:
        item = next(iter(batches), None)
        if item is None:
            raise TrainingError(f"the data ended at step {self.progress.step} of {self.limits.total_steps}")
        return item

    def _finish(self) -> None:
        self.read_counters()
        for hook in self._hooks:
            hook.finish(self)

    def train_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Run one optimiser step; ``step`` counts from 0."""
        ranks = self.engine.ranks
        with self.stopwatch.part("data"):
            moved = [batch.to(ranks.device) for batch in micro_batches]
        weights, totals = self._denominators(moved)
        for batch, own in zip(moved, weights, strict=True):
            self._micro_batch(batch, own, totals)
        self.lr_factor = self.schedule(step)
        with self.stopwatch.part("optimiser"):
            self.last_step = self.engine.step(self.lr_factor)
        self._count(step, self.last_step)

    def _denominators(self, batches: Sequence[Batch]) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Return each micro-batch's denominators, and their sums over micro-batches and ranks."""
        own = [self.drafter.denominators(batch) for batch in batches]
        names = sorted(own[0])
        flat = torch.stack([torch.stack([torch.as_tensor(d[n]).float() for n in names]) for d in own]).sum(dim=0)
        total = self.engine.ranks.sum_(flat.to(self.engine.ranks.device))
        return own, dict(zip(names, total.unbind(), strict=True))

    def _micro_batch(self, batch: Batch, own: Mapping[str, torch.Tensor], totals: Mapping[str, torch.Tensor]) -> None:
        with self.stopwatch.part("target"):
            features = self.features(batch)
        with self.stopwatch.part("draft"):
            output = self.engine.module(batch, features)
            self.engine.backward(normalised_loss(output.sums, self.drafter.coefficients, totals))
        for name, value in output.sums.items():
            self.meters.add(f"loss/{name}", Ratio(value, own[name]))
        for name, ratio in output.metrics.items():
            self.meters.add(name, ratio)
        self._tokens = self._tokens + (batch.segment_ids > 0).sum()

    def _count(self, step: int, info: StepInfo) -> None:
        self._skipped = self._skipped + info.skipped
        self._bad_in_a_row = (self._bad_in_a_row + 1) * info.skipped
        done, now = step + 1, time.monotonic()
        seconds, self._clock = self.progress.seconds + now - self._clock, now
        self.progress = replace(
            self.progress,
            step=done,
            seconds=seconds,
            epoch=done // max(1, self.limits.steps_per_epoch),
            samples=self.progress.samples + self.limits.global_batch_size,
        )
        if self.engine.ranks.device.type == "cpu" or done % self.limits.check_every == 0:
            self.read_counters()

    def read_tokens(self) -> int:
        """Return the tokens that all ranks read since the last call (collective)."""
        total = int(self.engine.ranks.sum_(self._tokens).item())
        self._tokens = torch.zeros_like(self._tokens)
        return total

    def read_counters(self) -> None:
        """Read the skipped steps from the device.

        Raises:
            TrainingError: too many in a row.
        """
        bad, skipped = int(self._bad_in_a_row.item()), int(self._skipped.item())
        self.progress = replace(self.progress, bad_steps_in_a_row=bad, skipped_steps=skipped)
        if bad >= self.limits.max_bad_steps:
            raise TrainingError(
                f"the gradient was not finite in {bad} steps in a row up to step {self.progress.step} "
                "(train.max_bad_steps); lower optim.lr, or use engine.precision=bf16 or fp32"
            )


def normalised_loss(
    sums: Mapping[str, torch.Tensor], coefficients: Mapping[str, float], totals: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return ``sum_t coefficient_t * sum_t / total_t``; a term that weighs nothing in the whole step counts zero."""
    terms = []
    for name, value in sums.items():
        total = totals[name]
        weight = torch.where(total > 0, coefficients[name] / total.clamp(min=1e-30), torch.zeros_like(total))
        terms.append(torch.where(total > 0, value.float() * weight, value.float() * 0.0))
    return torch.stack(terms).sum()
