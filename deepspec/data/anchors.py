"""Which anchors of a sample are trained on in an epoch: a pure function of (seed, epoch, sample id).

Drawn here, not in the model: the forward pass stays pure, the denominators are known before the backward pass, and the
same sample gets the same anchors on any rank, in any micro-batch, before and after a resume.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np


def anchor_candidates(loss_mask: Sequence[bool]) -> np.ndarray:
    """Return the positions a (int64, ascending) that are supervised and whose successor a+1 is supervised too."""
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:])


def draw_anchors(
    loss_mask: Sequence[bool], seed: int, epoch: int, sample_id: str, count: int, share: float | None = None
) -> list[int]:
    """Return at most ``count`` anchors of a sample, ascending positions inside the sample.

    With a ``share`` in (0, 1] no more than that part of its candidates, rounded up: each document is then trained on
    in proportion to what is supervised in it, however many documents lie in a row.
    """
    candidates = anchor_candidates(loss_mask)
    if share is not None:
        count = min(count, math.ceil(share * len(candidates)))
    if len(candidates) > count:
        rng = np.random.default_rng(_entropy(seed, epoch, sample_id))
        candidates = np.sort(rng.choice(candidates, size=count, replace=False))
    anchors: list[int] = candidates.tolist()
    return anchors


def _entropy(seed: int, epoch: int, sample_id: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{sample_id}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")
