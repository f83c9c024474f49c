"""The keys of ``conf/drafter/dspark.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.dspark.model import DSparkDrafter


@dataclass(frozen=True)
class DSparkConfig:
    """DSpark: a parallel block drafter with a semi-autoregressive Markov head and a confidence head."""

    num_layers: int = field(default=5, metadata={"help": "Decoder layers of the drafter"})
    gamma: int = field(default=7, metadata={"help": "Drafted tokens of a block"})
    markov_head: Literal["vanilla", "none"] = field(
        default="vanilla", metadata={"help": "Dependence between the tokens of a block: low-rank Markov, or none"}
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the Markov head"})
    confidence_head: bool = field(default=True, metadata={"help": "Train a head that predicts acceptance"})
    confidence_with_markov: bool = field(
        default=True, metadata={"help": "Let the confidence head see the previous token's Markov embedding"}
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Context positions a query sees (w-1 before it); null sees all"}
    )
    init: Literal["random", "target", "fitted"] = field(
        default="random",
        metadata={"help": "target copies the target's last layers; fitted fits the first by least squares instead"},
    )
    fit_samples: int = field(default=256, metadata={"help": "Training samples that init=fitted looks at"})
    draft_vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Tokens the drafter can propose, the most frequent of the training answers; "
            "null is the target's whole vocabulary"
        },
    )
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP width; null is the target's"})
    ce: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy term"})
    l1: float = field(default=0.9, metadata={"help": "Weight of ||q - p||_1, twice the total variation"})
    confidence: float = field(default=1.0, metadata={"help": "Weight of the confidence term"})
    decay: float = field(default=4.0, metadata={"help": "Slot j weighs exp(-j / decay), j from 0"})

    @property
    def uses_markov(self) -> bool:
        """Whether there is a Markov head."""
        return self.markov_head != "none"

    @property
    def confidence_sees_markov(self) -> bool:
        """Whether the confidence head reads the previous token's Markov embedding."""
        return self.confidence_with_markov and self.uses_markov

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        return [*self._size_problems(), *self._choice_problems(), *self._weight_problems()]

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> DSparkDrafter:
        """Build the drafter with random weights in fp32 on PyTorch's default device."""
        from deepspec.drafters.dspark.model import DSparkDrafter

        return DSparkDrafter(config=self, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)

    def _size_problems(self) -> list[str]:
        sizes: dict[str, int | None] = {
            "num_layers": self.num_layers,
            "gamma": self.gamma,
            "fit_samples": self.fit_samples,
        }
        sizes["intermediate_size"] = self.intermediate_size
        sizes["markov_rank"] = self.markov_rank if self.uses_markov else None
        problems = [
            f"drafter.{key}={value} must be at least 1"
            for key, value in sizes.items()
            if value is not None and value < 1
        ]
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            problems.append(
                f"drafter.draft_vocab_size={self.draft_vocab_size} leaves nothing to choose: give at least 2, or null"
            )
        if self.sliding_window is not None and self.sliding_window < 2:
            problems.append(
                f"drafter.sliding_window={self.sliding_window} leaves no context to see: give at least 2, or null"
            )
        return problems

    def _choice_problems(self) -> list[str]:
        problems = []
        if self.markov_head not in ("vanilla", "none"):
            problems.append(f"drafter.markov_head={self.markov_head!r} must be vanilla or none")
        if self.init not in ("random", "target", "fitted"):
            problems.append(f"drafter.init={self.init!r} must be random, target or fitted")
        if self.init == "fitted" and self.num_layers < 2:  # noqa: PLR2004 - one fitted, one from the target
            problems.append(f"drafter.num_layers={self.num_layers} must be at least 2 for drafter.init=fitted")
        if self.confidence_head and self.confidence_with_markov and not self.uses_markov:
            problems.append(
                "drafter.confidence_with_markov=true needs a Markov head: set it to false, or markov_head=vanilla"
            )
        return problems

    def _weight_problems(self) -> list[str]:
        weights = {"ce": self.ce, "l1": self.l1, "confidence": self.confidence}
        problems = [
            f"drafter.{key}={value} must be a finite number of at least 0"
            for key, value in weights.items()
            if not math.isfinite(value) or value < 0
        ]
        if self.ce == 0 and self.l1 == 0:
            problems.append("drafter.ce=0 and drafter.l1=0 leave nothing to learn: give one of them a weight")
        if not self.decay > 0:
            problems.append(f"drafter.decay={self.decay} must be above 0 (.inf weighs every slot alike)")
        return problems
