"""Samples and their anchors to one micro-batch of rows.

Shapes are bucketed, so that compiled code meets few of them: T is a multiple of 16, A a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from deepspec.contracts import Batch, Sample

LENGTH_STEP = 16
ANCHOR_STEP = 8


class Document(NamedTuple):
    """A sample and its anchors: ascending positions inside the sample; may be none."""

    sample: Sample
    anchors: Sequence[int]


def collate(rows: Sequence[Sequence[Document]], pad_id: int = 0) -> Batch:
    """Lay the documents of each of B rows one behind the other, and pad the rows on the right.

    A row without a document only keeps shapes equal. ``pad_id`` is any valid token id; nothing attends to padding.
    """
    lengths = [[len(document.sample.input_ids) for document in row] for row in rows]
    starts = [[sum(row[:i]) for i in range(len(row))] for row in lengths]
    length = _round_up(max(1, *map(sum, lengths)), LENGTH_STEP)
    anchors = [
        [start + anchor for start, document in zip(begin, row, strict=True) for anchor in document.anchors]
        for begin, row in zip(starts, rows, strict=True)
    ]
    num_anchors = _round_up(max(1, *map(len, anchors)), ANCHOR_STEP)
    return Batch(
        input_ids=_rows([_joined(d.sample.input_ids for d in row) for row in rows], length, pad_id),
        segment_ids=_rows([_joined([i] * n for i, n in enumerate(row, start=1)) for row in lengths], length, 0),
        position_ids=_rows([_joined(map(range, row)) for row in lengths], length, 0),
        loss_mask=_rows([_joined(d.sample.loss_mask for d in row) for row in rows], length, 0).bool(),
        anchor_indices=_rows(anchors, num_anchors, 0),  # [B, A]
        anchor_mask=_rows([[1] * len(row) for row in anchors], num_anchors, 0).bool(),
        sample_ids=tuple(document.sample.id for row in rows for document in row),
    )


_joined = chain.from_iterable


def _rows(rows: Sequence[Iterable[int]], width: int, fill: int) -> Tensor:
    """Return [B, width] int64, each row filled up on the right."""
    out = torch.full((len(rows), width), fill, dtype=torch.int64)
    for place, row in zip(out, rows, strict=True):
        values = torch.tensor(list(row), dtype=torch.int64)
        place[: len(values)] = values
    return out


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
