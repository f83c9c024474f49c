"""The plain PyTorch engine: what the DeepSpeed engine has to equal, and all that one machine needs.

Masters, gradients and moments are whole on every rank and fp32; 8-bit AdamW's moments are one byte each. The drafter
computes on low-precision copies of the masters (see ``LossModule``); gradients are summed over the ranks in fp32 once a
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.checkpoint.state import TrainState
from deepspec.drafters.files import saved_dtype
from deepspec.engine.base import DTYPES, LossModule
from deepspec.engine.optim import export_moments, import_moments, make_optimizers, set_lr
from deepspec.engine.update import LossScaler, Update, gradient_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepspec.config.schema import EngineConfig, OptimConfig
    from deepspec.contracts import Batch, Features, LossOutput
    from deepspec.drafters.base import Drafter
    from deepspec.engine.base import StepInfo
    from deepspec.engine.distributed import Ranks

BUCKET_ELEMENTS = 1 << 24  # elements of one all-reduce


class PlainEngine:
    """Plain PyTorch on one or more ranks."""

    def __init__(self, drafter: Drafter, *, ranks: Ranks, engine: EngineConfig, optim: OptimConfig) -> None:
        self.ranks = ranks
        self._drafter = drafter.to(ranks.device)
        dtype = DTYPES[engine.precision]
        self._loss_module = LossModule(drafter, compute=dtype, cast_to=dtype)
        self._named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self._optimizers = make_optimizers(drafter, optim)
        self._scaler = LossScaler(engine.initial_loss_scale, ranks.device) if engine.precision == "fp16" else None
        self._update = Update(optim.clip_norm, self._scaler)

    def module(self, batch: Batch, features: Features) -> LossOutput:
        """Run the drafter's objective."""
        output: LossOutput = self._loss_module(batch, features)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss`` to the masters' gradients."""
        (loss if self._scaler is None else loss * self._scaler.scale).backward()

    def step(self, lr_factor: float) -> StepInfo:
        """Sum gradients over the ranks, clip by the global norm, update; skip when not finite."""
        grads = [gradient_of(p) for p in self._named.values()]
        self._sum_over_ranks(grads)
        for optimizer in self._optimizers:
            set_lr(optimizer, lr_factor)
        return self._update(grads, self._optimizers)

    def _sum_over_ranks(self, grads: list[torch.Tensor]) -> None:
        if self.ranks.world_size == 1:
            return
        for bucket in _buckets(grads):
            flat = self.ranks.sum_(torch.cat([g.flatten() for g in bucket]))
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def export_state(self) -> TrainState:
        """Copy the state to the host, on the first rank."""
        if not self.ranks.is_first:
            return TrainState()
        moments, optimizer_step = export_moments(self._optimizers, self._named)
        return TrainState(
            parameters={
                n: p.detach().to("cpu", saved_dtype(p), copy=True) for n, p in self._drafter.state_dict().items()
            },
            moments=moments,
            optimizer_step=optimizer_step,
            loss_scale=self._scaler.state() if self._scaler is not None else {},
        )

    def import_state(self, state: TrainState) -> None:
        """Take over a state that any engine exported."""
        self._drafter.load_state_dict(state.parameters)
        for optimizer in self._optimizers:
            import_moments(optimizer, self._named, state)
        if self._scaler is not None:
            self._scaler.load(state.loss_scale)


def _buckets(grads: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for grad in grads:
        bucket.append(grad)
        size += grad.numel()
        if size >= BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
