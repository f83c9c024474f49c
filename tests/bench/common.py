"""What every benchmark shares: where it ran, the clock, the peak of memory, and pairs.

Timings go to standard output with the machine, the commit and the command; nothing is asserted about them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspec.log import emit

ROOT = Path(__file__).parents[2]
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}  # without one of them PyTorch emulates products in bf16
RESET_PEAK = "5"  # what /proc/self/clear_refs wants to hear


@dataclass(frozen=True)
class Measured:
    """One run of something."""

    seconds: float
    peak: int  # bytes above what was held before it


class Memory:
    """The most memory held since ``start``, less what was held then.

    On CUDA the allocator's count; on a CPU resident memory. Where the kernel lets no process reset its peak, the peak
    since the process began counts, which is right in a fresh one only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        """Begin to look for the peak."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        with suppress(AttributeError, OSError):  # a libc without it
            ctypes.CDLL(None).malloc_trim(0)  # what is free but kept would hide new memory
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(RESET_PEAK, encoding="ascii")
        self._before = _resident("VmRSS")

    def peak(self) -> int:
        """Return the peak since ``start`` in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _resident("VmHWM") - self._before)


def _resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes; ``VmHWM`` belongs to the memory map, so a parent's is not in it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return how long ``run`` takes, until the device has done all of it."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def measure(run: Callable[[], object], device: torch.device) -> Measured:
    """Run once; return time and peak."""
    memory = Memory(device)
    memory.start()
    seconds = seconds_of(run, device)
    return Measured(seconds, memory.peak())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(
    runs: Mapping[str, Callable[[int], Measured]], repeats: int, budget: float
) -> dict[str, dict[int, Measured]]:
    """Call every run with 0, 1, ... ``repeats``, all of them with one number before the next number.

    A run that has taken ``budget`` seconds in all drops out. Number 0 warms up: see ``settled``.
    """
    found: dict[str, dict[int, Measured]] = {name: {} for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if sum(one.seconds for one in found[name].values()) < budget:
                found[name][turn] = run(turn)
    return found


def settled(turns: Iterable[int]) -> list[int]:
    """Leave out turn 0, unless there is no other."""
    known = sorted(turns)
    return [turn for turn in known if turn > 0] or known


def median_ratio(slow: Mapping[int, Measured], fast: Mapping[int, Measured]) -> float | None:
    """Return the median over pairs (the same turn) of the first's time over the second's; None without a pair."""
    pairs = [slow[turn].seconds / fast[turn].seconds for turn in settled(slow.keys() & fast.keys())]
    return statistics.median(pairs) if pairs else None


def median_seconds(results: Mapping[int, Measured]) -> float:
    """Return the median time."""
    return statistics.median(results[turn].seconds for turn in settled(results))


def highest_peak(results: Mapping[int, Measured]) -> int:
    """Return the largest peak in bytes."""
    return max(one.peak for one in results.values())


def times(ratio: float | None) -> str:
    """Write a ratio for a table."""
    return "" if ratio is None else f"{ratio:.2f}"


def gigabytes(size: float) -> str:
    """Write bytes for a table, in units of 10^9."""
    return f"{size / 1e9:.2f}"


def choose_device(name: str) -> torch.device:
    """Return the device that ``--device`` names; ``auto`` is CUDA where there is one."""
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def emit_header(module: str, device: torch.device, arguments: Sequence[str] | None) -> None:
    """Write where, of what and by which command the figures below are; ``arguments`` None: those of the process."""
    command = shlex.join(["python", "-m", module, *(sys.argv[1:] if arguments is None else arguments)])
    emit(f"machine: {_machine(device)}\ncommit:  {_commit()}\ncommand: {command}\n")


def emit_row(cells: Sequence[str]) -> None:
    """Write a row of a table."""
    emit(f"| {' | '.join(cells)} |")


def emit_columns(names: Sequence[str]) -> None:
    """Write the head of a table."""
    emit_row(names)
    emit(f"|{'---|' * len(names)}")


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return f"{card.name}, {card.total_memory / 2**30:.0f} GiB, torch {torch.__version__}"
    model, flags = _processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    arithmetic = "with bf16 arithmetic" if flags & BF16_FLAGS else "no bf16 arithmetic"
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model} ({arithmetic}), {cores} cores, {torch.get_num_threads()} threads, {size:.0f} GiB, "
        f"torch {torch.__version__}"
    )


def _processor() -> tuple[str, set[str]]:
    """Return the processor's name and its flags."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        return facts.get("model name", platform.machine()), set(facts.get("flags", "").split())
    return platform.machine(), set()


def _commit() -> str:
    git = ["git", "-C", str(ROOT)]
    with suppress(OSError, subprocess.CalledProcessError):
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
        return found.stdout.strip() + (" with changes" if state.stdout.strip() else "")
    return "unknown"
