"""Metrics between two log lines: sums stay on the device, and are reduced over the ranks when the line is written."""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepspec.contracts import Ratio
    from deepspec.engine.distributed import Ranks

Value = float | list[float] | None


class RatioMeters:
    """Adds ratios up over micro-batches; the division happens once, after the ranks were summed."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, name: str, ratio: Ratio) -> None:
        """Add a scalar or per-position ratio; tensors are detached and not read."""
        numerator, denominator = _fp64(ratio.numerator), _fp64(ratio.denominator)
        denominator = denominator.to(numerator.device).expand_as(numerator)
        if name in self._sums:
            old = self._sums[name]
            self._sums[name] = (old[0] + numerator, old[1] + denominator)
        else:
            self._sums[name] = (numerator, denominator)

    def reduce(self, ranks: Ranks) -> dict[str, Value]:
        """Return the means over all ranks and forget them (collective). A weight of zero gives None."""
        names = sorted(self._sums)
        if not names:
            return {}
        parts = [t.flatten() for name in names for t in self._sums[name]]
        flat = ranks.sum_(torch.cat(parts)).cpu().split([p.numel() for p in parts])
        result = {name: _divide(flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(names)}
        self._sums = {}
        return result


def _fp64(value: torch.Tensor | float) -> torch.Tensor:
    return torch.as_tensor(value).detach().to(torch.float64)


def _divide(numerator: torch.Tensor, denominator: torch.Tensor) -> Value:
    values = [n / d if d > 0 else None for n, d in zip(numerator.tolist(), denominator.tolist(), strict=True)]
    if len(values) == 1:
        return values[0]
    return [float("nan") if v is None else v for v in values]


class Stopwatch:
    """Seconds per part of the step. On CUDA it places events in the queue and reads them at the log interval only."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a block under ``name``."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        if self._events:
            torch.cuda.synchronize()
        for name, begin, end in self._events:
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000.0
        seconds, self._seconds, self._events = self._seconds, {}, []
        return seconds


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
