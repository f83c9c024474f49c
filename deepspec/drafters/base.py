"""What the rest of DeepSpec asks of a drafter.

A drafter is one folder (here, or in a package of its own) that holds a configuration dataclass and a module. The engine
trains the module through ``forward``; the decoder drives it through ``start``, ``extend`` and ``propose``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from deepspec.contracts import Batch, Conventions, Features, LossOutput, Proposal, TargetInfo, TokenSampler
    from deepspec.nn.head import FrozenHead

LossPrecision = Literal["auto", "exact", "common_mode"]


class DrafterConfig(Protocol):
    """A frozen dataclass of plain values that knows how to build its drafter."""

    @property
    def gamma(self) -> int:
        """Drafted tokens of a block."""
        ...

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        ...

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> Drafter:
        """Build the drafter with random weights in fp32 on the CPU."""
        ...


class Drafter(nn.Module):
    """Base of every drafter: a module that is bound to the target's frozen embedding and head.

    The frozen tensors are not parameters of the drafter: they are neither trained, nor saved, nor counted.
    """

    conventions: Conventions
    coefficients: Mapping[str, float]
    """Weight of each loss term, by the names of ``LossOutput.sums``."""
    loss_precision: LossPrecision = "auto"
    """``engine.loss_precision``; whoever builds a training run sets it on the drafter."""

    def __init__(self) -> None:
        super().__init__()
        self._head: tuple[FrozenHead, ...] = ()

    @property
    def head(self) -> FrozenHead:
        """The target's embedding and head.

        Raises:
            RuntimeError: ``bind`` was not called.
        """
        if not self._head:
            raise RuntimeError("the drafter is not bound to a target: call bind(head) first")
        return self._head[0]

    def bind(self, head: FrozenHead) -> None:
        """Use the target's embedding and head from now on."""
        self._head = (head,)

    def initialise_from(self, target_model: nn.Module) -> list[str]:
        """Copy what fits from the target's own layers; return a line for each part that was taken."""
        raise NotImplementedError(f"{type(self).__name__} cannot be initialised from its target")

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weight (0-d fp32) of each loss term, from the batch alone."""
        raise NotImplementedError

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the weighted sums of the loss terms and the detached metrics of a micro-batch."""
        raise NotImplementedError

    def start(self, max_length: int) -> Any:
        """Return an empty decoding state for one sequence of at most ``max_length`` positions."""
        raise NotImplementedError

    def extend(self, state: Any, hidden: Tensor) -> None:
        """Append the target's features [t, C*D] of the next t committed positions to the state."""
        raise NotImplementedError

    def propose(self, state: Any, anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:
        """Draft ``num_tokens <= gamma`` tokens after ``anchor``, which sits right behind the state's positions."""
        raise NotImplementedError
