"""Ratios of sums over prompts, and paired bootstrap intervals.

A prompt is the unit that is drawn: its rounds depend on each other, so they are never resampled on their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the percentile interval of its bootstrap distribution."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return sum(numerators) / sum(denominators); nan when there is nothing to divide by."""
    total = sum(denominators)
    return sum(numerators) / total if total else float("nan")


def resample(num_prompts: int, resamples: int, seed: int) -> Tensor:
    """Draw ``resamples`` sets of prompts with replacement: indices [resamples, num_prompts].

    Everything that is compared uses the same draw, which makes the comparison paired.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_prompts, (resamples, num_prompts), generator=generator)


def bootstrap_ratio(numerators: Sequence[float], denominators: Sequence[float], draws: Tensor) -> Interval:
    """Return the ratio of sums over prompts with its interval; ``draws`` comes from ``resample``."""
    ratios = _ratios(numerators, denominators, draws)
    return _interval(ratio_of_sums(numerators, denominators), ratios)


def bootstrap_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]], draws: Tensor
) -> Interval:
    """Return first minus second, both ratios of sums over the same prompts: (numerators, denominators) each."""
    return _interval(ratio_of_sums(*first) - ratio_of_sums(*second), _ratios(*first, draws) - _ratios(*second, draws))


def bootstrap_mean(values: Sequence[float], draws: Tensor) -> Interval:
    """Return the mean over prompts with its interval."""
    return bootstrap_ratio(values, [1.0] * len(values), draws)


def bootstrap_median(values: Sequence[float], draws: Tensor) -> Interval:
    """Return the median over prompts with its interval."""
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"))
    data = torch.tensor(list(values), dtype=torch.float64)
    return _interval(float(data.quantile(0.5)), data[draws].quantile(0.5, dim=1))


def _ratios(numerators: Sequence[float], denominators: Sequence[float], draws: Tensor) -> Tensor:
    top = torch.tensor(list(numerators), dtype=torch.float64)
    bottom = torch.tensor(list(denominators), dtype=torch.float64)
    return top[draws].sum(dim=1) / bottom[draws].sum(dim=1)


def _interval(value: float, resampled: Tensor) -> Interval:
    usable = resampled[resampled.isfinite()]
    if len(usable) == 0:
        return Interval(value, float("nan"), float("nan"))
    tail = (1.0 - LEVEL) / 2.0
    low, high = usable.quantile(torch.tensor([tail, 1.0 - tail], dtype=usable.dtype)).tolist()
    return Interval(value, low, high)
