"""The learning rate as a function of the step alone, so that a resumed run gets the same rates bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleKind = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then one of three courses.

    ``cosine`` decays to ``min_ratio`` of the peak over all steps left; ``wsd`` (warm-up, stable, decay: MiniCPM, arXiv
    2404.06395) stays at the peak and falls to it in a line over the last ``decay_steps``; ``constant`` stays.
    """

    total_steps: int
    warmup_steps: int
    kind: ScheduleKind = "cosine"
    min_ratio: float = 0.0
    decay_steps: int = 0

    def __call__(self, step: int) -> float:
        """Return the share of the peak rate at ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        left = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / left)
        if self.kind == "wsd":
            fallen = (step - (self.total_steps - self.decay_steps)) / max(1, self.decay_steps)
            return 1.0 - (1.0 - self.min_ratio) * min(1.0, max(0.0, fallen))
        return self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def make_schedule(
    total_steps: int, *, warmup_ratio: float, kind: ScheduleKind, min_lr_ratio: float, decay_ratio: float = 0.0
) -> Schedule:
    """Turn shares of the run into steps."""
    warmup, decay = (math.ceil(ratio * total_steps) for ratio in (warmup_ratio, decay_ratio))
    return Schedule(total_steps, warmup, kind, min_lr_ratio, decay)
