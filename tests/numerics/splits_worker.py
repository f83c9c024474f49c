"""One rank of the split tests: gradients and updates of every engine, against the plain engine on one rank.

Started by torchrun; the first rank writes what it measured to the file given on the command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepspec.contracts import Batch
from deepspec.engine.distributed import Ranks, joined_ranks
from deepspec.engine.loop import Trainer
from tests.unit.engine import toy

STEPS = 20
Denominators = tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class PerRankMean(Trainer):
    """A planted fault: every rank divides by its own denominators."""

    def _denominators(self, batches: Sequence[Batch]) -> Denominators:
        own = [self.drafter.denominators(batch) for batch in batches]
        world = self.engine.ranks.world_size
        return own, {name: torch.stack([d[name] for d in own]).sum() * world for name in own[0]}


class PerMicroBatchMean(Trainer):
    """A planted fault: every micro-batch divides by its own denominators."""

    def _micro_batch(self, batch: Batch, own: Mapping[str, torch.Tensor], _totals: Mapping[str, torch.Tensor]) -> None:
        parts = toy.GLOBAL_BATCH // batch.input_ids.shape[0]
        super()._micro_batch(batch, own, {name: value * parts for name, value in own.items()})


class SilentHalf(Trainer):
    """Of a step's four samples the first two supervise nothing: on two ranks all that the first rank has."""

    def train_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        speaks = [torch.tensor([_in_second_half(name) for name in batch.sample_ids]) for batch in micro_batches]
        silenced = [replace(b, loss_mask=b.loss_mask & s[:, None]) for b, s in zip(micro_batches, speaks, strict=True)]
        super().train_step(step, silenced)


class AbsentHalf(Trainer):
    """The first two of a step's four samples are not there."""

    def train_step(self, step: int, micro_batches: Sequence[Batch]) -> None:
        names = [name for batch in micro_batches for name in batch.sample_ids if _in_second_half(name)]
        super().train_step(step, [toy.make_batch([int(name) for name in names])])


def _in_second_half(sample: str) -> bool:
    return int(sample) % toy.GLOBAL_BATCH >= toy.GLOBAL_BATCH // 2


def measure(ranks: Ranks, trainer: type[Trainer] = Trainer, **engine: Any) -> dict[str, Any]:
    """Return the first step's gradient (out of Adam's first moment) and the change after 20 steps, clipped and not."""
    result: dict[str, Any] = {}
    for name, clip in (("", 0.0), ("clipped_", 0.3)):
        optim = replace(toy.OPTIM, clip_norm=clip)
        run = toy.make_trainer(ranks, steps=1, engine=toy.engine_config(**engine), optim=optim, trainer=trainer)
        run.run()
        state = run.engine.export_state()
        result[f"{name}norm"] = run.last_step.grad_norm.item() if run.last_step is not None else 0.0
        gradient = {n: m["exp_avg"] / (1 - optim.betas[0]) for n, m in state.moments.items()}
        run.limits = replace(run.limits, total_steps=STEPS)
        run.run()
        state = run.engine.export_state()
        if ranks.is_first:
            start = toy.make_drafter().state_dict()
            result[f"{name}gradient"] = toy.flat(gradient)
            result[f"{name}update"] = toy.flat({n: p - start[n] for n, p in state.parameters.items()})
    return result


def compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return relative distances."""
    same = {k: toy.relative(found[k], reference[k]) for k in reference if isinstance(reference[k], torch.Tensor)}
    return same | {k: abs(found[k] / reference[k] - 1) for k in reference if isinstance(reference[k], float)}


def measure_all(ranks: Ranks, out: Path, engines: Sequence[str]) -> None:
    """Measure all that the tests ask about."""
    alone = measure(toy.ONE_RANK)
    largest = toy.GLOBAL_BATCH // ranks.world_size
    cases: dict[str, dict[str, Any]] = {}
    for engine in engines:
        kind, _, stage = engine.partition("-")
        for micro in (largest, 1):
            cases[f"{engine} micro {micro}"] = {
                "kind": kind,
                "zero_stage": int(stage or 0),
                "micro_batch_size": micro,
            }
    found = {name: measure(ranks, **values) for name, values in cases.items()}
    absent = measure(toy.ONE_RANK, AbsentHalf)
    ones = {name: values for name, values in cases.items() if values["micro_batch_size"] == 1}
    silent = {f"silent {name}": measure(ranks, SilentHalf, **values) for name, values in ones.items()}
    found["fault rank"] = measure(ranks, PerRankMean, micro_batch_size=largest)
    found["fault micro"] = measure(ranks, PerMicroBatchMean, micro_batch_size=1)
    if ranks.is_first:
        distances = {name: compare(value, alone) for name, value in found.items()}
        distances |= {name: compare(value, absent) for name, value in silent.items()}
        out.write_text(json.dumps(distances))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined_ranks(toy.engine_config(kind="deepspeed")) as joined:
        measure_all(joined, Path(sys.argv[1]), sys.argv[2:])
