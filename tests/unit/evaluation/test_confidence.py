"""Scores of a confidence head from chances, against outcomes that are really drawn."""

from __future__ import annotations

import math

import pytest
import torch

from deepspec.evaluation.confidence import expected_auc, expected_brier


def test_certain_outcomes_give_the_scores_of_the_textbook() -> None:
    confidence, kept = torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert expected_auc(confidence, kept) == pytest.approx(3 / 4)
    assert expected_brier(confidence, kept) == pytest.approx((0.01 + 0.64 + 0.49 + 0.01) / 4)


def test_a_tie_counts_one_half() -> None:
    assert expected_auc(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])) == pytest.approx(0.5)


def test_chances_give_the_mean_of_drawn_outcomes() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(60, generator=generator)
    confidence = (kept + 0.3 * torch.randn(60, generator=generator)).clamp(0, 1)
    outcomes = (torch.rand(4000, 60, generator=generator) < kept).double()
    brier = (confidence - outcomes).square().mean()
    assert expected_brier(confidence, kept) == pytest.approx(float(brier), abs=2e-3)
    pairs = torch.tensor([_pairs(confidence, row) for row in outcomes[:1500]])  # ordered and all pairs of each draw
    assert expected_auc(confidence, kept) == pytest.approx(float(pairs[:, 0].sum() / pairs[:, 1].sum()), abs=5e-3)


def _pairs(confidence: torch.Tensor, outcome: torch.Tensor) -> tuple[float, float]:
    good, bad = confidence[outcome == 1], confidence[outcome == 0]
    above = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    return float(above.sum()), float(above.numel())


def test_one_slot_has_no_pair() -> None:
    assert math.isnan(expected_auc(torch.tensor([0.5]), torch.tensor([0.5])))
