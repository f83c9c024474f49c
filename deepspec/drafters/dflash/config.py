"""The keys of ``conf/drafter/dflash.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepspec.contracts import BlockLayout, TargetInfo
    from deepspec.drafters.dflash.model import DFlashDrafter
    from deepspec.drafters.objective import Terms

MIN_FITTED_LAYERS = 2  # one that is fitted, and one from the target


@dataclass(frozen=True)
class BlockConfig:
    """The keys of every drafter with a parallel block backbone."""

    num_layers: int = field(default=5, metadata={"help": "Decoder layers of the drafter"})
    gamma: int = field(default=7, metadata={"help": "Drafted tokens of a block"})
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
    decay: float = field(default=4.0, metadata={"help": "Slot j weighs exp(-j / decay), j from 0"})

    @property
    def block_layout(self) -> BlockLayout:
        """What the rows of a block predict: the next token (anchor_first), or their own (fill_in)."""
        return "anchor_first"

    @property
    def terms(self) -> Terms:
        """The weights of the draft's loss."""
        from deepspec.drafters.objective import Terms

        return Terms(ce=self.ce, l1=self.l1)

    @property
    def slot_weights(self) -> list[float]:
        """exp(-j / decay) of each slot j (K)."""
        return [math.exp(-slot / self.decay) for slot in range(self.gamma)]

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        return [*self._size_problems(), *self._choice_problems(), *self._weight_problems()]

    def _sizes(self) -> dict[str, int | None]:
        """Return the keys that hold a count of at least 1; null says nothing."""
        names = ("num_layers", "gamma", "fit_samples", "intermediate_size")
        return {name: getattr(self, name) for name in names}

    def _choices(self) -> dict[str, tuple[str, ...]]:
        """Return the keys that hold one of a few words, and the words."""
        return {"init": ("random", "target", "fitted")}

    def _loss_weights(self) -> dict[str, float]:
        return {"ce": self.ce, "l1": self.l1}

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
        if self.sliding_window is not None and self.sliding_window < 2:  # noqa: PLR2004 - itself and one before it
            problems.append(
                f"drafter.sliding_window={self.sliding_window} leaves no context to see: give at least 2, or null"
            )
        return problems

    def _choice_problems(self) -> list[str]:
        problems = [
            f"drafter.{key}={getattr(self, key)!r} must be {', '.join(words[:-1])} or {words[-1]}"
            for key, words in self._choices().items()
            if getattr(self, key) not in words
        ]
        if self.init == "fitted" and self.num_layers < MIN_FITTED_LAYERS:
            problems.append(f"drafter.num_layers={self.num_layers} must be at least 2 for drafter.init=fitted")
        return problems

    def _weight_problems(self) -> list[str]:
        problems = [
            f"drafter.{key}={value} must be a finite number of at least 0"
            for key, value in self._loss_weights().items()
            if not math.isfinite(value) or value < 0
        ]
        if self.ce == 0 and self.l1 == 0:
            problems.append("drafter.ce=0 and drafter.l1=0 leave nothing to learn: give one of them a weight")
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
