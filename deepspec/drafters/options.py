"""The keys that every drafter of this package has. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspec.drafters.objective import Terms

TERMS = ("ce", "soft_ce", "l1", "lk", "lk_mix", "reverse_kl", "jsd")
"""The keys that weigh a part of the draft's loss."""


@dataclass(frozen=True)
class DrafterOptions:
    """Layers, window, vocabulary and the weights of the loss."""

    num_layers: int = field(default=5, metadata={"help": "Decoder layers of the drafter"})
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
    ce: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy of the text"})
    soft_ce: float = field(
        default=0.0, metadata={"help": "Weight of the cross-entropy against the target's distribution"}
    )
    l1: float = field(default=0.9, metadata={"help": "Weight of ||q - p||_1, twice the total variation"})
    lk: float = field(default=0.0, metadata={"help": "Weight of -log(acceptance)"})
    lk_mix: float = field(
        default=0.0, metadata={"help": "Weight of c KL + (1 - c) TV with c = exp(-lk_eta * acceptance)"}
    )
    lk_eta: float = field(default=3.0, metadata={"help": "How fast lk_mix turns from KL to TV"})
    reverse_kl: float = field(default=0.0, metadata={"help": "Weight of KL(q || p)"})
    jsd: float = field(default=0.0, metadata={"help": "Weight of the Jensen-Shannon divergence of p and q"})

    @property
    def gamma(self) -> int:
        """Drafted tokens of a block."""
        raise NotImplementedError

    @property
    def terms(self) -> Terms:
        """The weights of the draft's loss."""
        from deepspec.drafters.objective import Terms

        return Terms(
            ce=self.ce,
            soft=self.soft_ce,
            l1=self.l1,
            lk=self.lk,
            mix=self.lk_mix,
            eta=self.lk_eta,
            reverse=self.reverse_kl,
            jsd=self.jsd,
        )

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        return [*self._size_problems(), *self._choice_problems(), *self._weight_problems()]

    def _sizes(self) -> dict[str, int | None]:
        """Return the keys that hold a count of at least 1; null says nothing."""
        return {"num_layers": self.num_layers, "intermediate_size": self.intermediate_size}

    def _choices(self) -> dict[str, tuple[str, ...]]:
        """Return the keys that hold one of a few words, and the words."""
        return {}

    def _loss_weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in (*TERMS, "lk_eta")}

    def _shortest_window(self) -> tuple[int, str]:
        """Return the smallest sliding window that makes sense, and what a smaller one lacks."""
        return 2, "leaves no context to see"

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
        least, lacking = self._shortest_window()
        if self.sliding_window is not None and self.sliding_window < least:
            problems.append(f"drafter.sliding_window={self.sliding_window} {lacking}: give at least {least}, or null")
        return problems

    def _choice_problems(self) -> list[str]:
        return [
            f"drafter.{key}={getattr(self, key)!r} must be {', '.join(words[:-1])} or {words[-1]}"
            for key, words in self._choices().items()
            if getattr(self, key) not in words
        ]

    def _weight_problems(self) -> list[str]:
        problems = [
            f"drafter.{key}={value} must be a finite number of at least 0"
            for key, value in self._loss_weights().items()
            if not math.isfinite(value) or value < 0
        ]
        if not any(getattr(self, name) for name in TERMS):
            problems.append(
                f"drafter.{', '.join(TERMS[:-1])} and {TERMS[-1]} are all 0, which leaves nothing to learn: "
                "give one of them a weight"
            )
        return problems
