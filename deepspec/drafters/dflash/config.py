"""The keys of ``conf/drafter/dflash.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deepspec.drafters.blocks.options import BlockOptions

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.dflash.model import DFlashDrafter


@dataclass(frozen=True)
class DFlashConfig(BlockOptions):
    """DFlash: a parallel block drafter, all tokens of a block at once."""

    block_layout: Literal["anchor_first", "fill_in"] = field(
        default="anchor_first",
        metadata={"help": "anchor_first: the anchor's row predicts the first token; fill_in: it predicts nothing"},
    )

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> DFlashDrafter:
        """Build the drafter with random weights in fp32 on PyTorch's default device."""
        from deepspec.drafters.dflash.model import DFlashDrafter

        return DFlashDrafter(config=self, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)

    def _choices(self) -> dict[str, tuple[str, ...]]:
        return {**super()._choices(), "block_layout": ("anchor_first", "fill_in")}

    def _choice_problems(self) -> list[str]:
        problems = super()._choice_problems()
        if self.init == "fitted" and self.block_layout == "fill_in":
            problems.append(
                "drafter.init=fitted needs rows that predict the next token: set drafter.block_layout=anchor_first, "
                "or drafter.init=target"
            )
        return problems
