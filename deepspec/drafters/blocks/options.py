"""The keys that every block drafter has. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deepspec.drafters.options import DrafterOptions

if TYPE_CHECKING:
    from deepspec.contracts import BlockLayout

MIN_FITTED_LAYERS = 2  # one that is fitted, and one from the target


@dataclass(frozen=True)
class BlockOptions(DrafterOptions):
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
