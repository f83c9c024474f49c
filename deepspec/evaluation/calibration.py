"""Sequential temperature scaling of a confidence head (DSpark, section 3.2.1), and scores of how true it is.

The chance that a block is kept up to slot j is the product of the confidences up to j, sigmoid(logit_i / T_i). Slot by
slot, left to right, T_j is the one of a grid that makes this product true, the temperatures before it being fixed: the
one with the least expected calibration error against "everything up to slot j was kept".

Rounds that the end of a text cut are censored: a slot that nobody judged counts nowhere. A slot behind a refused one
was judged, for then not everything up to it was kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.evaluation.confidence import expected_auc, expected_brier
from deepspec.inference.proposers import survival_chances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BINS = 15
"""Equally wide bins of the expected calibration error, as Guo et al. 2017 have them."""
GRID = tuple(10.0 ** (k / 20.0) for k in range(-20, 21))
"""41 temperatures, 0.1 .. 10, evenly spaced in their logarithm."""
MIN_ROUNDS = 30
"""A slot that fewer rounds judged keeps a temperature of 1: its error would be that of the draw."""


@dataclass(frozen=True)
class ConfidenceRounds:
    """What a confidence head said in n rounds of decoding, and what became of them."""

    logits: Tensor  # [n, K] fp32, log-odds that slot j is kept given that all before it were
    kept: Tensor  # [n, K] bool, whether everything up to slot j was kept
    judged: Tensor  # [n, K] bool, False where slot j was not drafted, or the text ended before it was judged


@dataclass(frozen=True)
class SlotScore:
    """How true the product of confidences up to one slot is; the scores are nan where nothing says so."""

    rounds: int  # that judged it
    kept: int  # of them: everything up to it was kept
    ece: float
    brier: float
    auc: float


def fit_temperatures(rounds: ConfidenceRounds, min_rounds: int = MIN_ROUNDS) -> tuple[float, ...]:
    """Return the temperature of each slot (K)."""
    fitted: list[float] = []
    for j in range(rounds.logits.shape[1]):
        seen = rounds.judged[:, j]
        before = survival_chances(rounds.logits[seen, :j], fitted)[:, -1] if j else torch.ones(int(seen.sum()))
        enough = int(seen.sum()) >= min_rounds
        fitted.append(_best(before, rounds.logits[seen, j], rounds.kept[seen, j]) if enough else 1.0)
    return tuple(fitted)


def _best(before: Tensor, logits: Tensor, kept: Tensor) -> float:
    """Return the temperature for chances ``before`` [n] and log-odds [n]; among equals the nearest to 1."""
    candidates = sorted(GRID, key=lambda temperature: abs(math.log(temperature)))
    errors = [calibration_error(before * (logits / temperature).sigmoid(), kept) for temperature in candidates]
    return candidates[errors.index(min(errors))]


def slot_scores(rounds: ConfidenceRounds, temperatures: Sequence[float] | None = None) -> list[SlotScore]:
    """Return the scores of each slot (K) under ``temperatures``, or under none."""
    chances = survival_chances(rounds.logits, temperatures)
    return [_score(chances[seen, j], rounds.kept[seen, j]) for j, seen in enumerate(rounds.judged.unbind(dim=1))]


def _score(chances: Tensor, kept: Tensor) -> SlotScore:
    count, nothing = len(chances), float("nan")
    return SlotScore(
        rounds=count,
        kept=int(kept.sum()),
        ece=calibration_error(chances, kept),
        brier=expected_brier(chances, kept) if count else nothing,
        auc=expected_auc(chances, kept),
    )


def calibration_error(chances: Tensor, kept: Tensor, bins: int = BINS) -> float:
    """Return the expected calibration error of ``chances`` [n] against ``kept`` [n] bool; nan without a round.

    The rounds are sorted into ``bins`` by their chance; it is the mean over rounds of |mean chance - share kept| of the
    round's bin.
    """
    if not len(chances):
        return float("nan")
    place = (chances.double() * bins).long().clamp(0, bins - 1)
    said = torch.bincount(place, weights=chances.double(), minlength=bins)
    true = torch.bincount(place, weights=kept.double(), minlength=bins)
    return float((said - true).abs().sum() / len(chances))
