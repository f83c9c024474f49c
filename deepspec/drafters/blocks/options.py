"""The keys that every block drafter has. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from deepspec.drafters.options import DrafterOptions

if TYPE_CHECKING:
    from deepspec.contracts import BlockLayout
    from deepspec.drafters.objective import Terms

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
    position_weights: Literal["decay", "none", "dpace"] = field(
        default="decay",
        metadata={
            "help": "What slots weigh in the draft's loss: as decay says, all alike, "
            "or what each adds to the expected accepted length (D-PACE)"
        },
    )
    pace_smoothing: float = field(
        default=0.5,
        metadata={"help": "D-PACE counts a chance q of the text's token as (1 - pace_smoothing) q + pace_smoothing"},
    )

    @property
    def block_layout(self) -> BlockLayout:
        """What the rows of a block predict: the next token (anchor_first), or their own (fill_in)."""
        return "anchor_first"

    @property
    def slot_weights(self) -> list[float]:
        """The weight of each slot (K); under D-PACE that of the confidence term and of metrics alone."""
        if self.position_weights == "none":
            return [1.0] * self.gamma
        return [math.exp(-slot / self.decay) for slot in range(self.gamma)]

    @property
    def terms(self) -> Terms:
        """The weights of the draft's loss."""
        return super().terms._replace(pace=self.pace_smoothing if self.position_weights == "dpace" else None)

    def _sizes(self) -> dict[str, int | None]:
        return {**super()._sizes(), "gamma": self.gamma, "fit_samples": self.fit_samples}

    def _choices(self) -> dict[str, tuple[str, ...]]:
        return {"init": ("random", "target", "fitted"), "position_weights": ("decay", "none", "dpace")}

    def _choice_problems(self) -> list[str]:
        problems = super()._choice_problems()
        if self.init == "fitted" and self.num_layers < MIN_FITTED_LAYERS:
            problems.append(f"drafter.num_layers={self.num_layers} must be at least 2 for drafter.init=fitted")
        return problems

    def _weight_problems(self) -> list[str]:
        problems = super()._weight_problems()
        if not self.decay > 0:
            problems.append(f"drafter.decay={self.decay} must be above 0 (.inf weighs every slot alike)")
        if not 0 < self.pace_smoothing <= 1:
            problems.append(f"drafter.pace_smoothing={self.pace_smoothing} must be above 0 and at most 1")
        return problems
