"""The keys that every autoregressive drafter has. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspec.drafters.objective import Terms


@dataclass(frozen=True)
class ChainConfig:
    """Autoregressive drafters: layers, window, vocabulary and the weights of the loss."""

    num_layers: int = field(default=1, metadata={"help": "Decoder layers of the drafter"})
    sliding_window: int | None = field(
        default=None, metadata={"help": "Positions a query sees (w-1 before it); null sees all"}
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Tokens the drafter can propose, the most frequent of the training answers; "
            "null is the target's whole vocabulary"
        },
    )
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP width; null is the target's"})
    ce: float = field(default=0.0, metadata={"help": "Weight of the cross-entropy of the text"})
    soft_ce: float = field(
        default=1.0, metadata={"help": "Weight of the cross-entropy against the target's distribution"}
    )
    l1: float = field(default=0.0, metadata={"help": "Weight of ||q - p||_1, twice the total variation"})

    @property
    def gamma(self) -> int:
        """Drafted tokens of a block."""
        raise NotImplementedError

    @property
    def slot_weights(self) -> list[float]:
        """The weight of each slot (K)."""
        return [1.0] * self.gamma

    @property
    def terms(self) -> Terms:
        """The weights of the draft's loss."""
        from deepspec.drafters.objective import Terms

        return Terms(ce=self.ce, soft=self.soft_ce, l1=self.l1)

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        return [*self._size_problems(), *self._weight_problems()]

    def _sizes(self) -> dict[str, int | None]:
        """Return the keys that hold a count of at least 1; null says nothing."""
        return {"num_layers": self.num_layers, "intermediate_size": self.intermediate_size}

    def _loss_weights(self) -> dict[str, float]:
        return {"ce": self.ce, "soft_ce": self.soft_ce, "l1": self.l1}

    def _size_problems(self) -> list[str]:
        problems = [
            f"drafter.{key}={value} must be at least 1"
            for key, value in self._sizes().items()
            if value is not None and value < 1
        ]
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:  # noqa: PLR2004 - one leaves no choice
            problems.append(
                f"drafter.draft_vocab_size={self.draft_vocab_size} leaves nothing to choose: give at least 2, or null"
            )
        if self.sliding_window is not None and self.sliding_window <= self.gamma:
            problems.append(
                f"drafter.sliding_window={self.sliding_window} is shorter than a block and the token before it: "
                f"give at least {self.gamma + 1}, or null"
            )
        return problems

    def _weight_problems(self) -> list[str]:
        problems = [
            f"drafter.{key}={value} must be a finite number of at least 0"
            for key, value in self._loss_weights().items()
            if not math.isfinite(value) or value < 0
        ]
        if not any(self.terms):
            problems.append(
                "drafter.ce=0, drafter.soft_ce=0 and drafter.l1=0 leave nothing to learn: give one of them a weight"
            )
        return problems
