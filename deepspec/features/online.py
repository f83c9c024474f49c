"""Features from the target itself, run on each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

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
