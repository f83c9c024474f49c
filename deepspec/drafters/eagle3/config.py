"""The keys of ``conf/drafter/eagle3.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepspec.drafters.chains.options import ChainOptions

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.eagle3.model import Eagle3Drafter


@dataclass(frozen=True)
class Eagle3Config(ChainOptions):
    """Eagle3: an autoregressive drafter on fused features, trained along its own drafts (training-time test)."""

    ttt_length: int = field(default=7, metadata={"help": "Steps of the training-time test: drafted tokens of a block"})
    step_decay: float = field(default=0.8, metadata={"help": "Step j weighs step_decay ** j, j from 0"})
    qk_norm: bool = field(
        default=False, metadata={"help": "RMSNorm on the heads of queries and keys; false is the Llama-shaped layout"}
    )

    @property
    def gamma(self) -> int:
        """Drafted tokens of a block."""
        return self.ttt_length

    @property
    def slot_weights(self) -> list[float]:
        """step_decay ** j of each slot j (K)."""
        return [self.step_decay**slot for slot in range(self.ttt_length)]

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> Eagle3Drafter:
        """Build the drafter with random weights in fp32 on PyTorch's default device."""
        from deepspec.drafters.eagle3.model import Eagle3Drafter

        return Eagle3Drafter(config=self, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)

    def _sizes(self) -> dict[str, int | None]:
        return {**super()._sizes(), "ttt_length": self.ttt_length}

    def _weight_problems(self) -> list[str]:
        problems = super()._weight_problems()
        if not 0 < self.step_decay <= 1:
            problems.append(f"drafter.step_decay={self.step_decay} must be above 0 and at most 1")
        return problems
