"""Features from the target itself, run on each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Features
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


class RememberingFeatures:
    """A source that can keep the features of some batches until they are asked for once more."""

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._kept: dict[tuple[str, ...], tuple[Tensor, Features]] = {}

    def remember(self, batch: Batch) -> Features:
        """Return the features of ``batch`` and keep them."""
        features = self._source(batch)
        self._kept[batch.sample_ids] = (batch.input_ids, features)
        return features

    def __call__(self, batch: Batch) -> Features:
        """Return the features of ``batch``; kept ones are handed out once and then forgotten."""
        input_ids, features = self._kept.pop(batch.sample_ids, (None, None))
        if input_ids is None or features is None or not input_ids.equal(batch.input_ids):
            return self._source(batch)
        return features
