"""Dynamic loss scale for fp16: halve after an overflow, double after many steps without one."""

from __future__ import annotations

import torch

GROWTH_INTERVAL = 1000  # steps without an overflow before the scale doubles


class LossScaler:
    """A loss scale that lives on the device, so that neither reading nor updating it makes the host wait."""

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
