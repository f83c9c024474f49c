"""The keys of ``conf/drafter/dspark.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deepspec.drafters.blocks.options import BlockOptions

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.dspark.model import DSparkDrafter


@dataclass(frozen=True)
class DSparkConfig(BlockOptions):
    """DSpark: a parallel block drafter with a semi-autoregressive Markov head and a confidence head."""

    markov_head: Literal["vanilla", "gated", "rnn", "none"] = field(
        default="vanilla",
        metadata={
            "help": "Dependence between the tokens of a block: low-rank Markov, gated by the slot's state, "
            "recurrent over the whole prefix, or none"
        },
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the Markov head"})
    confidence_head: bool = field(default=True, metadata={"help": "Train a head that predicts acceptance"})
    confidence_with_markov: bool = field(
        default=True, metadata={"help": "Let the confidence head see the previous token's Markov embedding"}
    )
    confidence: float = field(default=1.0, metadata={"help": "Weight of the confidence term"})

    @property
    def uses_markov(self) -> bool:
        """Whether there is a Markov head."""
        return self.markov_head != "none"

    @property
    def confidence_sees_markov(self) -> bool:
        """Whether the confidence head reads the previous token's Markov embedding."""
        return self.confidence_with_markov and self.uses_markov

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> DSparkDrafter:
        """Build the drafter with random weights in fp32 on PyTorch's default device."""
        from deepspec.drafters.dspark.model import DSparkDrafter

        return DSparkDrafter(config=self, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)

    def _sizes(self) -> dict[str, int | None]:
        return {**super()._sizes(), "markov_rank": self.markov_rank if self.uses_markov else None}

    def _choices(self) -> dict[str, tuple[str, ...]]:
        return {**super()._choices(), "markov_head": ("vanilla", "gated", "rnn", "none")}

    def _loss_weights(self) -> dict[str, float]:
        return {**super()._loss_weights(), "confidence": self.confidence}

    def _choice_problems(self) -> list[str]:
        problems = super()._choice_problems()
        if self.confidence_head and self.confidence_with_markov and not self.uses_markov:
            problems.append(
                "drafter.confidence_with_markov=true needs a Markov head: set it to false, or markov_head=vanilla"
            )
        return problems
