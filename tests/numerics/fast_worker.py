"""One rank of the fast tests: the split measurements, then the first half of the resume test."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from deepspec.engine.distributed import joined_ranks
from tests.numerics import resume_worker, splits_worker
from tests.unit.engine import toy

if __name__ == "__main__":
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    middle = words.index("--")
    torch.set_num_threads(1)
    with joined_ranks(toy.engine_config(kind="deepspeed")) as ranks:
        splits_worker.measure_all(ranks, folder / "measured.json", words[:middle])
        resume_worker.run_cases("straight", ranks, folder, words[middle + 1 :])
