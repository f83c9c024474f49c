"""The keys that every autoregressive drafter has. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspec.drafters.options import DrafterOptions


@dataclass(frozen=True)
class ChainOptions(DrafterOptions):
    """Autoregressive drafters: one layer, and the target's distribution as what is learned."""

    num_layers: int = field(default=1, metadata={"help": "Decoder layers of the drafter"})
    ce: float = field(default=0.0, metadata={"help": "Weight of the cross-entropy of the text"})
    soft_ce: float = field(
        default=1.0, metadata={"help": "Weight of the cross-entropy against the target's distribution"}
    )
    l1: float = field(default=0.0, metadata={"help": "Weight of ||q - p||_1, twice the total variation"})

    @property
    def slot_weights(self) -> list[float]:
        """The weight of each slot (K)."""
        return [1.0] * self.gamma

    def _shortest_window(self) -> tuple[int, str]:
        return self.gamma + 1, "is shorter than a block and the token before it"
