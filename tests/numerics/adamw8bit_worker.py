"""One rank of the test that a run under 8-bit AdamW goes on as if nothing had happened."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from deepspec.engine.distributed import Ranks, joined_ranks
from deepspec.engine.loop import Trainer
from tests.unit.engine import toy

OPTIM = replace(toy.OPTIM, name="adamw8bit", lr=1e-3)


def make(ranks: Ranks, kind: str, steps: int) -> Trainer:
    """Build a run whose matrices are large enough for 8-bit moments."""
    drafter = toy.ToyConfig(width=600).build(toy.INFO, (1, 2), 3)
    engine = toy.engine_config(kind=kind, micro_batch_size=2)
    return toy.make_trainer(ranks, steps=steps, engine=engine, optim=OPTIM, drafter=drafter)


def ends_the_same(ranks: Ranks, kind: str, folder: Path) -> bool:
    """Return whether 3 + 3 steps, by way of a checkpoint that the first rank wrote, equal 6."""
    whole, first, second = make(ranks, kind, 6), make(ranks, kind, 3), make(ranks, kind, 6)
    whole.run()
    first.run()
    store = toy.make_store(folder, first.drafter)
    state = first.engine.export_state()
    if ranks.is_first:
        store.save(state, first.progress)
    ranks.any(False)  # the others wait until it is written
    second.resume(store.load("step-000003"))
    second.run()
    ends = [toy.flat(dict(trainer.drafter.state_dict())) for trainer in (whole, second)]
    return ends[0].equal(ends[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined_ranks(toy.engine_config(kind="deepspeed")) as joined:
        out = Path(sys.argv[1])
        same = {kind: ends_the_same(joined, kind, out.parent / kind) for kind in ("plain", "deepspeed")}
        if joined.is_first:
            out.write_text(json.dumps(same))
