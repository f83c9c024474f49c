"""The keys of ``conf/drafter/dflash.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deepspec.drafters.options import DrafterOptions

if TYPE_CHECKING:
    from deepspec.contracts import BlockLayout, TargetInfo
    from deepspec.drafters.dflash.model import DFlashDrafter

MIN_FITTED_LAYERS = 2  # one that is fitted, and one from the target


@dataclass(frozen=True)
class BlockConfig(DrafterOptions):
    """The keys of every drafter with a parallel block backbone."""

    gamma: int = field(default=7, metadata={"help": "Drafted tokens of a block"})
    init: Literal["random", "target", "fitted"] = field(
        default="random",
        metadata={"help": "target copies the target's last layers; fitted fits the first by least squares instead"},
    )
    fit_samples: int = field(default=256, metadata={"help": "Training samples that init=fitted looks at"})
    decay: float = field(default=4.0, metadata={"help": "Slot j weighs exp(-j / decay), j from 0"})

    @property
    def block_layout(self) -> BlockLayout:
        """What the rows of a block predict: the next token (anchor_first), or their own (fill_in)."""
        return "anchor_first"

    @property
    def slot_weights(self) -> list[float]:
        """exp(-j / decay) of each slot j (K)."""
        return [math.exp(-slot / self.decay) for slot in range(self.gamma)]

    def _sizes(self) -> dict[str, int | None]:
        return {**super()._sizes(), "gamma": self.gamma, "fit_samples": self.fit_samples}

    def _choices(self) -> dict[str, tuple[str, ...]]:
        return {"init": ("random", "target", "fitted")}

    def _choice_problems(self) -> list[str]:
        problems = super()._choice_problems()
        if self.init == "fitted" and self.num_layers < MIN_FITTED_LAYERS:
            problems.append(f"drafter.num_layers={self.num_layers} must be at least 2 for drafter.init=fitted")
        return problems

    def _weight_problems(self) -> list[str]:
        problems = super()._weight_problems()
        if not self.decay > 0:
            problems.append(f"drafter.decay={self.decay} must be above 0 (.inf weighs every slot alike)")
        return problems


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
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
