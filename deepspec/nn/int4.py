"""Weights of 4 bits: two to a byte, one scale for each group of neighbouring columns.

A weight [o, i] is stored as ``packed`` [o, i/2] uint8 and ``scale`` [o, i/g] fp16, with g columns to a group. Byte c of
a row holds column 2c in its low half and column 2c+1 in its high half, each as value + 8 with values -8 .. 7; the
weight is value * scale of its group. A group has an even number of columns and divides the width, so no half byte is
left over.

There is no product on 4 bits here: the weight is multiplied out when it is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_INT4, MAX_INT4 = -8, 7
OFFSET = 8
HALF_BYTE = 4


def pack_int4(values: Tensor) -> Tensor:
    """Return [o, i/2] uint8 of ``values`` [o, i] in -8 .. 7, i even."""
    shifted = (values + OFFSET).to(torch.uint8)
    return shifted[:, 0::2] | (shifted[:, 1::2] << HALF_BYTE)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the values [o, i] int8 of ``packed`` [o, i/2] uint8."""
    halves = torch.stack((packed & (2**HALF_BYTE - 1), packed >> HALF_BYTE), dim=-1)  # [o, i/2, 2]
    return halves.flatten(1).to(torch.int8) - OFFSET


def dequantise_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [o, i] that ``packed`` [o, i/2] uint8 and ``scale`` [o, i/g] stand for."""
    values = unpack_int4(packed)
    grouped = values.view(*scale.shape, -1).to(torch.float32)  # [o, i/g, g]
    return (grouped * scale.to(torch.float32)[..., None]).view_as(values).to(dtype)
