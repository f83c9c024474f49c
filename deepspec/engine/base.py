"""What the loop asks of an engine, and the module in which every engine runs the drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from deepspec.checkpoint.state import TrainState
    from deepspec.contracts import Batch, Features, LossOutput
    from deepspec.drafters.base import Drafter
    from deepspec.engine.distributed import Ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepInfo:
    """What one optimiser step did; 0-d fp32 tensors on the engine's device, so that nobody has to wait for them."""

    grad_norm: torch.Tensor  # global norm before clipping
    skipped: torch.Tensor  # 1 when the gradient was not finite and nothing was updated
    loss_scale: torch.Tensor


class Engine(Protocol):
    """Runs the drafter's forward and backward pass and its updates.

    The loop owns normalisation: it hands ``backward`` a loss that is already divided by the denominators of the whole
    step, and the engine adds gradients up over micro-batches and ranks.
    """

    ranks: Ranks

    def module(self, batch: Batch, features: Features) -> LossOutput:
        """Run the drafter's objective in the engine's precision."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss`` to this step's gradient."""
        ...

    def step(self, lr_factor: float) -> StepInfo:
        """Update once with the peak learning rates times ``lr_factor``, and forget the gradient."""
        ...

    def export_state(self) -> TrainState:
        """Gather the whole state on the first rank (collective; the other ranks get an empty one)."""
        ...

    def import_state(self, state: TrainState) -> None:
        """Take over a whole state, which every rank has read (collective)."""
        ...


class LossModule(nn.Module):
    """Calls the drafter's objective in the compute precision.

    With ``cast_to`` the parameters stay fp32 masters and each call sees low-precision copies of them; gradients reach
    the masters in fp32, so accumulation over micro-batches is fp32 too.
    """

    def __init__(self, drafter: Drafter, *, compute: torch.dtype, cast_to: torch.dtype | None = None) -> None:
        super().__init__()
        self.drafter = drafter
        self._compute = compute
        self._cast_to = None if cast_to == torch.float32 else cast_to

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the drafter's weighted sums and metrics."""
        features = replace(features, hidden=features.hidden.to(self._compute))
        if self._cast_to is None:
            output: LossOutput = self.drafter(batch, features)
            return output
        copies = {name: p.to(self._cast_to) for name, p in self.drafter.named_parameters()}
        return torch.func.functional_call(self.drafter, copies, (batch, features))
