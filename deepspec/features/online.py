"""Features from the target itself, run on each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from deepspec.contracts import Features
from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch
    from deepspec.targets.target import Target


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
        return Features(
            hidden=_stack([row.hidden for row in rows], width),
            last_hidden=_stack([row.last_hidden for row in rows], width),
        )

    def _row(self, sample: str, batch: Batch, index: int) -> Features:
        """Return the features of one row, [1, t, ...] for its t tokens."""
        length = int((batch.segment_ids[index] > 0).sum())
        tokens = batch.input_ids[index, :length]
        known, features = self._kept.get(sample, (None, None))
        if known is not None and features is not None and known.equal(tokens):
            return features
        features = self._source(_one_row(batch, index, length))
        size = sum(x.numel() * x.element_size() for x in (features.hidden, features.last_hidden))
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
    """Join rows [1, t, D] of different lengths to [B, width, D]."""
    return torch.cat([functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in rows])
