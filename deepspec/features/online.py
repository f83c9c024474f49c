"""Features from the target itself, run on each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from deepspec.contracts import Features
from deepspec.losses.products import whole_sums
from deepspec.nn.spans import document_spans, is_packed, neighbours, one_document, part_of_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch
    from deepspec.nn.head import FrozenHead
    from deepspec.nn.spans import Span
    from deepspec.targets.target import Target


SUMMED_ROWS = 256
ENOUGH_TOKENS = 512  # of a pass of the target on a CPU
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
    """Runs the frozen target; on a CPU over a few documents of packed rows at a time.

    A mask that keeps documents apart hides work from the target's attention there, but does not spare it; few tokens,
    on the other hand, do not pay for reading all its weights.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        self.target = target
        self.layer_ids = tuple(layer_ids)

    def __call__(self, batch: Batch) -> Features:
        """Return the target's features of ``batch``."""
        if batch.input_ids.device.type != "cpu" or not is_packed(batch):
            return self.target.features(batch, self.layer_ids)
        spans = neighbours(document_spans(batch), ENOUGH_TOKENS)
        found = [self.target.features(part_of_row(batch, span), self.layer_ids) for span in spans]
        return _joined(found, spans, batch)


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
    last bit whichever row and batch the sample comes in, before and after a resume.
    """

    def __init__(self, source: FeatureSource, max_bytes: int) -> None:
        self._source, self._room = source, max_bytes
        self._kept: dict[str, tuple[Tensor, Features]] = {}

    def __call__(self, batch: Batch) -> Features:
        """Return the features of ``batch``, zeros where it is padded."""
        spans = document_spans(batch)
        if len(spans) != len(batch.sample_ids):
            raise RuntimeError(f"a batch of {len(spans)} documents names {len(batch.sample_ids)} samples")
        found = [self._document(name, batch, span) for name, span in zip(batch.sample_ids, spans, strict=True)]
        return _joined(found, spans, batch) if found else self._source(batch)

    def _document(self, sample: str, batch: Batch, span: Span) -> Features:
        """Return the features of one document, [1, t, ...] for its t tokens."""
        tokens = batch.input_ids[span.row, span.start : span.stop]
        known, features = self._kept.get(sample, (None, None))
        if known is not None and features is not None and known.equal(tokens):
            return features
        features = self._source(one_document(batch, span))
        parts = [getattr(features, name) for name in _PARTS]
        size = sum(x.numel() * x.element_size() for x in parts if x is not None)
        if sample not in self._kept and size <= self._room:
            self._room -= size
            self._kept[sample] = (tokens, features)
        return features


def _joined(found: Sequence[Features], spans: Sequence[Span], batch: Batch) -> Features:
    """Put the features of each document into their places; the rest of the rows gets zeros."""
    parts = {name: [getattr(features, name) for features in found] for name in _PARTS}
    shape = batch.input_ids.shape
    return Features(**{name: _laid_out(part, spans, shape) for name, part in parts.items() if part[0] is not None})


def _laid_out(parts: Sequence[Tensor], spans: Sequence[Span], shape: torch.Size) -> Tensor:
    """Put what belongs to each document, [1, t, ...], into its place of [B, T, ...]."""
    whole = parts[0].new_zeros(*shape, *parts[0].shape[2:])
    for part, span in zip(parts, spans, strict=True):
        whole[span.row, span.start : span.stop] = part[0]
    return whole


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
