"""Start a worker module on a few gloo ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a process that imports this tree."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | extra


def start_ranks(module: str, *args: str, world_size: int) -> list[int]:
    """Run ``python -m module args`` on ``world_size`` ranks and return their exit codes; output goes to pytest's."""
    port = str(free_port())
    processes = []
    for rank in range(world_size):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **where)
        processes.append(subprocess.Popen([sys.executable, "-m", module, *args], cwd=ROOT, env=env))
    try:
        return [process.wait(timeout=560) for process in processes]
    finally:
        for process in processes:
            process.kill()
