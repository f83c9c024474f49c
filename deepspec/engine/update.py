"""The update of one step from whole fp32 gradients: unscale, clip by the global norm, skip what is not finite.

With AdamW nothing here makes the host wait for the device; any other optimiser waits to know whether to skip. 8-bit
AdamW has to: bitsandbytes takes the count of updates, which the bias correction wants, as a number of the host, and its
kernels read no flag. (It also waits for the device after every parameter, by itself.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.engine.base import StepInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

GROWTH_INTERVAL = 1000  # steps without an overflow before the scale doubles


class LossScaler:
    """Dynamic loss scale for fp16, on the device: halved after an overflow, doubled after many steps without one."""

    def __init__(self, initial: float, device: torch.device) -> None:
        self.scale = torch.tensor(float(initial), device=device)
        self._good_steps = torch.tensor(0.0, device=device)

    def update(self, overflow: torch.Tensor) -> None:
        """Take note of a step; ``overflow`` is 0-d, 1 when its gradient was not finite."""
        good = (self._good_steps + 1.0) * (1.0 - overflow)
        grown = good >= GROWTH_INTERVAL
        factor = torch.where(overflow > 0, 0.5, torch.where(grown, 2.0, 1.0))
        self.scale = (self.scale * factor).clamp(min=1.0)
        self._good_steps = torch.where(grown, torch.zeros_like(good), good)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint has to hold."""
        return {"scale": self.scale.item(), "good_steps": self._good_steps.item()}

    def load(self, state: dict[str, float]) -> None:
        """Go on from ``state``; an empty one (the run was not fp16 before) keeps the initial scale."""
        if state:
            self.scale.fill_(state["scale"])
            self._good_steps.fill_(state["good_steps"])


class Update:
    """Clips and applies a step's gradients."""

    def __init__(self, clip_norm: float, scaler: LossScaler | None) -> None:
        self._clip_norm, self._scaler = clip_norm, scaler

    @torch.no_grad()
    def __call__(self, grads: list[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> StepInfo:
        """Change ``grads`` in place, step the optimisers unless a gradient is not finite, and drop the gradients."""
        scale = grads[0].new_ones(()) if self._scaler is None else self._scaler.scale.clone()
        if self._scaler is not None:
            torch._foreach_mul_(grads, 1.0 / scale)
        norm = torch.nn.utils.get_total_norm(grads)
        skipped = 1.0 - torch.isfinite(norm).float()
        if self._clip_norm > 0:
            torch._foreach_mul_(grads, (self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        for optimizer in optimizers:
            step_unless(optimizer, skipped)
            optimizer.zero_grad(set_to_none=True)
        if self._scaler is not None:
            self._scaler.update(skipped)
        return StepInfo(grad_norm=norm, skipped=skipped, loss_scale=scale)


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient, zeros when no loss term reached the parameter: every rank has to send the same tensors."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def step_unless(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Update unless ``skipped`` is 1: on the device with fused AdamW, by looking with any other optimiser."""
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()
