"""How well a confidence head foretells acceptance, from chances instead of drawn outcomes.

A slot with chance a to be kept is a kept slot of weight a and a refused one of weight 1 - a. Both scores below are what
outcomes drawn with those chances give on average, without the noise of drawing them.
"""

from __future__ import annotations

import torch


def expected_brier(confidence: torch.Tensor, kept: torch.Tensor) -> float:
    """Return the mean over slots [n] of E[(confidence - outcome)^2] for outcomes of chance ``kept``; 0 is best."""
    c, a = confidence.double(), kept.double()
    return float(((c - a).square() + a * (1 - a)).mean())


def expected_auc(confidence: torch.Tensor, kept: torch.Tensor) -> float:
    """Return the chance that a kept slot has more confidence than another, refused one; a tie counts one half.

    ``confidence`` and ``kept`` are [n]; nan where no two different slots can be one kept and one refused.
    """
    a = kept.double()
    _, place = torch.unique(confidence.double(), return_inverse=True)  # places rise with confidence
    won = torch.bincount(place, weights=a)
    lost = torch.bincount(place, weights=1 - a)
    below = lost.cumsum(0) - lost
    itself = (a * (1 - a)).sum()  # a slot is no pair with itself
    pairs = a.sum() * (1 - a).sum() - itself
    ordered = (won * (below + lost / 2)).sum() - itself / 2
    return float(ordered / pairs) if pairs > 0 else float("nan")
