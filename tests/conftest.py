"""Settings of every test: offline, two threads at most (one for each of several workers), seeded."""

from __future__ import annotations

import os
import random
import sys

import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
}
for _name in ("DEEPSPEC_RUN_ID", "DEEPSPEC_RUNS", "DEEPSPEC_CACHE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(_name, None)

THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1)
if THREADS == 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same random numbers, and PyTorch, where it is loaded, few threads."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
