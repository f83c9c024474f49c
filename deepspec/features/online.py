"""Features from the target itself, run on each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from deepspec.contracts import Features
from deepspec.errors import ConfigError
from deepspec.losses.products import whole_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch
    from deepspec.nn.head import FrozenHead
    from deepspec.targets.target import Target


SUMMED_ROWS = 256
SUMS_PAY = 4
"""Visits from which on the sums of all positions, once, cost less than those of the anchors' slots at each visit: timed
on the quickstart, at three visits they cost more."""
_PARTS = ("hidden", "last_hidden", "log_sum", "top")


class FeatureSource(Protocol):
    """Anything that says what the target says about a batch."""

    def __call__(self, batch: Batch) -> Features:
        """Return the target's features of ``batch``."""
        ...


class OnlineFeatures:
    """Runs the frozen target."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self.target = target
        self.layer_ids = tuple(layer_ids)

    def __call__(self, batch: Batch) -> Features:
        """Return the target's features of ``batch``."""
        return self.target.features(batch, self.layer_ids)


class SummedFeatures:
    """Features with the sum over the target's whole vocabulary of each position that judges a slot.

    A reduced draft vocabulary needs no more of the rest of it, so that a sample which is visited again costs the
    product with the whole head once.
    """

    def __init__(self, source: FeatureSource, head: FrozenHead) -> None:
        self._source, self._head = source, head

    def __call__(self, batch: Batch) -> Features:
        """Return the features of ``batch`` with their sums."""
        features = self._source(batch)
        judges = functional.pad(batch.loss_mask[:, 1:], (0, 1))  # [B, T] those whose next token is supervised
        states = features.last_hidden[judges]
        sums = torch.zeros(judges.shape, device=judges.device)
        top = torch.zeros(judges.shape, device=judges.device, dtype=torch.int64)
        if len(states):
            parts = [whole_sums(rows, self._head) for rows in states.split(SUMMED_ROWS)]
            sums[judges], top[judges] = (torch.cat(column) for column in zip(*parts, strict=True))
        return replace(features, log_sum=sums, top=top)


class RememberedFeatures:
    """Features of samples that stay in memory for the epochs that follow, as long as there is room.

    The source is run on one sample at a time and without padding: what it says of a sample is then the same to the
    last bit whichever batch the sample comes in, before and after a resume.
    """

    def __init__(self, source: FeatureSource, max_bytes: int) -> None:
        self._source, self._room = source, max_bytes
        self._kept: dict[str, tuple[Tensor, Features]] = {}

    def __call__(self, batch: Batch) -> Features:
        """Return the features of ``batch``, zeros where it is padded.

        Raises:
            ConfigError: a row holds several samples.
        """
        rows = [self._row(sample, batch, index) for index, sample in enumerate(_names(batch))]
        width = batch.input_ids.shape[1]
        parts = {name: [getattr(row, name) for row in rows] for name in _PARTS}
        return Features(**{name: _stack(part, width) for name, part in parts.items() if part[0] is not None})

    def _row(self, sample: str, batch: Batch, index: int) -> Features:
        """Return the features of one row, [1, t, ...] for its t tokens."""
        length = int((batch.segment_ids[index] > 0).sum())
        tokens = batch.input_ids[index, :length]
        known, features = self._kept.get(sample, (None, None))
        if known is not None and features is not None and known.equal(tokens):
            return features
        features = self._source(_one_row(batch, index, length))
        parts = [getattr(features, name) for name in _PARTS]
        size = sum(x.numel() * x.element_size() for x in parts if x is not None)
        if sample not in self._kept and size <= self._room:
            self._room -= size
            self._kept[sample] = (tokens, features)
        return features


def _names(batch: Batch) -> Sequence[str]:
    if len(batch.sample_ids) != batch.input_ids.shape[0]:
        raise ConfigError(
            f"a batch of {batch.input_ids.shape[0]} rows holds {len(batch.sample_ids)} samples, but features are "
            "remembered for rows of one sample each: set features.memory_gib=0"
        )
    return batch.sample_ids


def _one_row(batch: Batch, index: int, length: int) -> Batch:
    """Return row ``index`` of a batch without its padding."""
    tokens = {
        name: getattr(batch, name)[index : index + 1, :length]
        for name in ("input_ids", "segment_ids", "position_ids", "loss_mask")
    }
    anchors = {name: getattr(batch, name)[index : index + 1] for name in ("anchor_indices", "anchor_mask")}
    return replace(batch, **tokens, **anchors, sample_ids=batch.sample_ids[index : index + 1])


def _stack(rows: Sequence[Tensor], width: int) -> Tensor:
    """Join rows [1, t, ...] of different lengths to [B, width, ...]."""
    joined = rows[0].new_zeros(len(rows), width, *rows[0].shape[2:])
    for place, row in zip(joined, rows, strict=True):
        place[: row.shape[1]] = row[0]
    return joined


def online_features(
    target: Target, layer_ids: Sequence[int], memory_gib: float, *, reduced: bool, visits: int
) -> FeatureSource:
    """Return the features of a run: from the target, and remembered in ``memory_gib`` where that is not 0.

    ``reduced`` says that the drafter proposes some of the target's tokens only, ``visits`` how often a sample comes.
    """
    source: FeatureSource = OnlineFeatures(target, layer_ids)
    if memory_gib > 0:
        source = SummedFeatures(source, target.head) if reduced and visits >= SUMS_PAY else source
        source = RememberedFeatures(source, int(memory_gib * 2**30))
    return source
