"""Make a target and its drafter fast at decoding, without changing what they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.log import get_logger
from deepspec.nn.packed import pack_head, pack_linears

if TYPE_CHECKING:
    from deepspec.drafters.base import Drafter
    from deepspec.targets.target import Target

log = get_logger(__name__)


def accelerate(target: Target, drafter: Drafter | None = None) -> int:
    """Pack the weights of fp32 models on the CPU for products with few rows; return how many matrices were packed.

    The target's weights are packed only where that is exact. The drafter's may be rounded to fp16: its precision
    decides how much is accepted, never what the output is. Everything else stays as it is, on CUDA all of it.
    """
    if target.head.weight.device.type != "cpu" or target.head.weight.dtype != torch.float32:
        return 0
    count = pack_linears(target.model)
    target.head = pack_head(target.head)
    if drafter is not None:
        drafter.bind(target.head)
        count += pack_linears(drafter, rounding=True)
    log.info("packed %d weight matrices for decoding", count)
    return count
