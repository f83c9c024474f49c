"""Statistics against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from deepspec.evaluation.statistics import (
    bootstrap_difference,
    bootstrap_mean,
    bootstrap_median,
    bootstrap_ratio,
    ratio_of_sums,
    resample,
)


def test_ratio_of_sums_is_not_the_mean_of_ratios() -> None:
    assert ratio_of_sums([1, 9], [1, 3]) == 2.5
    assert math.isnan(ratio_of_sums([], []))


def test_interval_of_a_mean_has_the_normal_width() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    interval = bootstrap_mean(values.tolist(), resample(400, 4000, seed=1))
    half = 1.96 * float(values.std(correction=0)) / 20
    assert interval.value == pytest.approx(float(values.mean()))
    assert interval.high - interval.value == pytest.approx(half, rel=0.08)
    assert interval.value - interval.low == pytest.approx(half, rel=0.08)


def test_interval_of_a_ratio_has_the_width_of_the_delta_method() -> None:
    generator = torch.Generator().manual_seed(2)
    bottom = 10 + 5 * torch.rand(300, generator=generator, dtype=torch.float64)
    top = 2 * bottom + torch.randn(300, generator=generator, dtype=torch.float64)
    interval = bootstrap_ratio(top.tolist(), bottom.tolist(), resample(300, 4000, seed=3))
    residual = top - interval.value * bottom
    deviation = float((residual.square().mean() / 300).sqrt() / bottom.mean())
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * deviation, rel=0.08)


def test_pairing_cancels_what_both_share() -> None:
    hard = torch.rand(50, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 10
    ones = [1.0] * 50
    draws = resample(50, 1000, seed=5)
    difference = bootstrap_difference(((hard + 1).tolist(), ones), (hard.tolist(), ones), draws)
    assert (difference.value, difference.low, difference.high) == pytest.approx((1.0, 1.0, 1.0))
    assert bootstrap_mean(hard.tolist(), draws).high - bootstrap_mean(hard.tolist(), draws).low > 1


def test_median() -> None:
    interval = bootstrap_median([1.0, 2.0, 100.0], resample(3, 2000, seed=0))
    assert (interval.value, interval.low, interval.high) == (2.0, 1.0, 100.0)


def test_the_seed_fixes_the_interval() -> None:
    assert torch.equal(resample(7, 20, seed=1), resample(7, 20, seed=1))
    assert not torch.equal(resample(7, 20, seed=1), resample(7, 20, seed=2))
