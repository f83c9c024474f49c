"""Samples and their anchors to one padded micro-batch.

Shapes are bucketed, so that compiled code meets few of them: T is a multiple of 16, A a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspec.contracts import Batch, Sample

LENGTH_STEP = 16
ANCHOR_STEP = 8


def collate(samples: Sequence[Sample], anchors: Sequence[Sequence[int]], pad_id: int = 0) -> Batch:
    """Pad B samples on the right; one document a row.

    Args:
        samples: B samples.
        anchors: for each sample its anchors, ascending positions inside the sample; may be empty.
        pad_id: any valid token id; nothing attends to padding.
    """
    length = _round_up(max(len(s.input_ids) for s in samples), LENGTH_STEP)
    num_anchors = _round_up(max(1, *(len(a) for a in anchors)), ANCHOR_STEP)
    segment_ids = _rows([[1] * len(s.input_ids) for s in samples], length, 0)  # [B, T]
    positions = torch.arange(length).expand_as(segment_ids)
    return Batch(
        input_ids=_rows([s.input_ids for s in samples], length, pad_id),
        segment_ids=segment_ids,
        position_ids=positions * segment_ids,  # [B, T], 0 on padding
        loss_mask=_rows([s.loss_mask for s in samples], length, 0).bool(),
        anchor_indices=_rows(anchors, num_anchors, 0),  # [B, A]
        anchor_mask=_rows([[1] * len(a) for a in anchors], num_anchors, 0).bool(),
        sample_ids=tuple(s.id for s in samples),
    )


def _rows(rows: Sequence[Sequence[int]], width: int, fill: int) -> Tensor:
    """Return [B, width] int64, each row filled up on the right."""
    out = torch.full((len(rows), width), fill, dtype=torch.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
    return out


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
