"""One rank of the resume tests, in two starts that share a folder.

``straight``: for every case a run of 10 steps, and one that dies by SIGKILL at step 7 after a checkpoint at step 5.
``resume``: every dead run goes on to step 10; also under another engine (``other``), for elastic checkpoints.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from deepspec.engine.distributed import Ranks, joined_ranks
from deepspec.engine.hooks import LogHook, SaveHook
from deepspec.engine.loop import Hook, Trainer
from deepspec.engine.tracker import JsonLines, Trackers
from tests.unit.engine import toy

OTHER = {"plain": "deepspeed-2", "deepspeed-0": "deepspeed-3", "deepspeed-1": "deepspeed-3", "deepspeed-2": "plain"}
VOCABULARY = (2, 5, 9)


class AbandonError(Exception):
    """Leaves a run in the middle; the process is killed before it can clean up."""


class AbandonHook:
    """Raises at step 7."""

    def start(self, trainer: Trainer) -> None: ...

    def after_step(self, trainer: Trainer) -> None:
        if trainer.progress.step == 7:
            raise AbandonError

    def finish(self, trainer: Trainer) -> None: ...


def make(case: str, ranks: Ranks, folder: Path, *, engine: str | None = None, die: bool = False) -> Trainer:
    """Build the run of ``case`` (ENGINE:PRECISION) in ``folder``."""
    kind, _, stage = (engine or case.split(":")[0]).partition("-")
    config = toy.engine_config(kind=kind, zero_stage=int(stage or 0), precision=case.split(":")[1], micro_batch_size=2)
    drafter = toy.make_drafter()
    drafter.reduce_vocabulary(len(VOCABULARY), toy.INFO.vocab_size)
    store = toy.make_store(folder / "checkpoints", drafter)
    tracker = Trackers([JsonLines(folder / "metrics.jsonl")] if ranks.is_first else [])
    folder.mkdir(parents=True, exist_ok=True)
    hooks: list[Hook] = [
        LogHook(tracker, every=1, peak_lr=toy.OPTIM.lr),
        SaveHook(store, 5),
        *([AbandonHook()] if die else []),
    ]
    optim = replace(toy.OPTIM, clip_norm=0.5)
    trainer = toy.make_trainer(ranks, steps=10, engine=config, hooks=hooks, drafter=drafter, optim=optim)
    name = ranks.from_first(store.newest() if ranks.is_first else None)
    drafter.set_vocabulary(VOCABULARY if name is None else (0, 1, 2))  # other data; the checkpoint's are taken over
    if name is not None:
        trainer.resume(store.load(name))
    return trainer


def run_cases(mode: str, ranks: Ranks, folder: Path, cases: Sequence[str]) -> None:
    """Run one half of the test; the first half ends by SIGKILL."""
    paths = {case: folder / case.replace(":", "_") for case in cases}
    for case, path in paths.items():
        if mode == "resume":
            make(case, ranks, path / "killed").run()
            continue
        make(case, ranks, path / "straight").run()
        for copy in ("killed", "elastic"):
            with suppress(AbandonError):
                make(case, ranks, path / copy, die=True).run()
    if mode == "straight":
        os.kill(os.getpid(), signal.SIGKILL)
    for case, path in paths.items():
        make(case, ranks, path / "elastic", engine=OTHER.get(case.split(":")[0], "plain")).run()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined_ranks(toy.engine_config(kind="deepspeed")) as joined:
        run_cases(sys.argv[1], joined, Path(sys.argv[2]), sys.argv[3:])
