"""One rank of the test that every drafter's gradient is the same on one rank and, sharded, on two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspec.contracts import Batch, Features
from deepspec.data.collate import collate
from deepspec.engine.build import build_engine
from deepspec.engine.distributed import Ranks, joined_ranks
from deepspec.engine.loop import normalised_loss
from tests.unit.drafters.small import TAPS, WIDTH, dflash, drafter, eagle3, mtp, packed, row
from tests.unit.engine import toy

DRAFTERS: dict[str, Callable[[], Any]] = {
    "dspark": drafter,
    "dspark gated": partial(drafter, markov_head="gated"),
    "dspark rnn": partial(drafter, markov_head="rnn"),
    "dspark D-PACE": partial(drafter, position_weights="dpace"),
    "dflash fill-in": partial(dflash, block_layout="fill_in"),
    "eagle3": partial(eagle3, num_layers=2),
    "mtp": mtp,
}


Case = tuple[Batch, Features]


def two_documents() -> list[Case]:
    """Return a row for each of two ranks."""
    return [row(17, [3, 6, 11], seed=1), row(33, [4, 27], seed=2)]


def packed_rows() -> list[Case]:
    """Return the same two documents in one row for the first rank, and a row without a document for the second."""
    empty = collate([[]])
    shape = empty.input_ids.shape
    nothing = Features(torch.zeros(*shape, len(TAPS) * WIDTH), torch.zeros(*shape, WIDTH))
    return [packed(*two_documents()), (empty, nothing)]


def gradient(
    ranks: Ranks, make: Callable[[], Any], kind: str, stage: int = 0, cases: Callable[[], list[Case]] = two_documents
) -> dict[str, torch.Tensor]:
    """Return the first step's gradient, out of Adam's first moment; each rank has one of two cases."""
    model = make()
    config = toy.engine_config(kind=kind, zero_stage=stage, micro_batch_size=1, global_batch_size=2)
    engine = build_engine(model, ranks=ranks, engine=config, optim=toy.OPTIM)
    weights = [model.denominators(batch) for batch, _ in cases()]
    totals = {name: torch.stack([w[name] for w in weights]).sum() for name in weights[0]}
    for batch, features in cases()[ranks.rank :: ranks.world_size]:
        output = engine.module(batch, features)
        engine.backward(normalised_loss(output.sums, model.coefficients, totals))
    engine.step(1.0)
    moments = engine.export_state().moments
    return {name: moment["exp_avg"] / (1 - toy.OPTIM.betas[0]) for name, moment in moments.items()}


def measure_all(ranks: Ranks, out: Path) -> None:
    """Write the distance of every drafter's gradients from those of one rank."""
    distances = {}
    for name, make in DRAFTERS.items():
        alone = gradient(toy.ONE_RANK, make, "plain")
        for stage in (2, 3):
            for cases in (two_documents, packed_rows):
                found = gradient(ranks, make, "deepspeed", stage, cases)
                if ranks.is_first:
                    what = f"{name}, ZeRO {stage}, {cases.__name__}"
                    distances[what] = toy.relative(toy.flat(found), toy.flat(alone))
    if ranks.is_first:
        out.write_text(json.dumps(distances))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined_ranks(toy.engine_config(kind="deepspeed")) as joined:
        measure_all(joined, Path(sys.argv[1]))
