"""The learning rate as a function of the step alone, so that a resumed run gets the same rates bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then cosine decay to ``min_ratio`` of it, or a constant rate."""

    total_steps: int
    warmup_steps: int
    kind: Literal["cosine", "constant"] = "cosine"
    min_ratio: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the share of the peak rate at ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        left = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / left)
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def make_schedule(
    total_steps: int, *, warmup_ratio: float, kind: Literal["cosine", "constant"], min_lr_ratio: float
) -> Schedule:
    """Turn shares of the run into steps."""
    return Schedule(total_steps, math.ceil(warmup_ratio * total_steps), kind, min_lr_ratio)
