"""What a training run must remember to go on as if nothing had happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TrainState:
    """The engine's state in plain, whole tensors: independent of ranks, ZeRO stage and engine.

    ``parameters`` are the fp32 master weights under the drafter's published names. ``moments[name]`` holds the
    optimiser's tensors of one parameter, each of the parameter's shape: ``exp_avg`` and ``exp_avg_sq`` (AdamW) or
    ``momentum_buffer`` (Muon); or those of ``engine/adamw8bit.py``. Both are empty on every rank but the first when an
    engine exports its state.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    optimizer_step: int = 0  # updates that were really taken; skipped ones do not count
    loss_scale: dict[str, float] = field(default_factory=dict)  # empty unless fp16


@dataclass(frozen=True)
class Progress:
    """How far a run has come. ``step`` is the truth; the other numbers follow the same optimiser steps."""

    step: int = 0  # optimiser steps done, skipped ones included: the position in the sample order
    epoch: int = 0
    samples: int = 0
    skipped_steps: int = 0
    bad_steps_in_a_row: int = 0
    seconds: float = field(default=0.0, compare=False)  # of training, over all parts of the run that led here
