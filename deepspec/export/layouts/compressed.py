"""Linears as compressed-tensors stores them: INT8 with one scale per output channel, plain or packed into INT32.

W8A8 (``int-quantized``): ``X.weight`` int8 [o, i] and ``X.weight_scale`` fp32 [o, 1]; the server quantises
activations per token. W8A16 (``pack-quantized``): ``X.weight_packed`` int32 [o, i/4] holds values + 128, the first in
the lowest byte; ``X.weight_scale`` [o, 1] is in the 16-bit type, ``X.weight_shape`` int64 [2] is (o, i). Weight-only
INT8 has to be packed: servers refuse it in the other format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from deepspec.errors import PackageError
from deepspec.export.quantise import quantise_rows, round_rows
from deepspec.nn.int8 import dequantise

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

FORMATS = {"w8a8": "int-quantized", "w8a16": "pack-quantized"}
PER_WORD = 4  # values of 8 bits in an int32
ZERO_POINT = 128  # added before packing
SUFFIXES = ("_packed", "_scale", "_shape")


def quantisation_config(scheme: str, ignore: Collection[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of ``scheme`` for every linear but those that a pattern of ``ignore`` names.

    The target is the class: names never match in SGLang, which builds its layers without them. ``ignore`` is regular
    expressions: vLLM prefixes names, so a plain ``fc`` would match nothing and corrupt the matrix in silence.
    """
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    activations = {**int8, "strategy": "token", "dynamic": True} if scheme == "w8a8" else None
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": FORMATS[scheme],
        "ignore": ["lm_head", *(f"re:.*{name}" for name in ignore)],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**int8, "strategy": "channel", "dynamic": False},
                "input_activations": activations,
                "output_activations": None,
            }
        },
    }


def compress(name: str, weight: Tensor, scheme: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that stand for the fp32 ``weight`` [o, i], under names made from ``name``."""
    values, scale = quantise_rows(weight)
    if scheme == "w8a8":
        return {name: values, f"{name}_scale": scale}
    scale = _round_up(scale, dtype)
    return {
        f"{name}_packed": pack(round_rows(weight, scale.float())),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def restore(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the fp32 weight [o, i] that the tensors made from ``name`` stand for.

    Raises:
        PackageError: a tensor that belongs to it is missing or misshapen.
    """
    scale = tensors.get(f"{name}_scale")
    if scale is None:
        raise PackageError(f"tensor {name}_scale is missing: {name} is quantised")
    packed, values = tensors.get(f"{name}_packed"), tensors.get(name)
    if packed is not None:
        shape = tensors.get(f"{name}_shape")
        if shape is None or shape.numel() != 2 or shape.is_floating_point():  # noqa: PLR2004 - rows and columns
            raise PackageError(f"tensor {name}_shape is missing, or is not two whole numbers")
        if packed.dtype != torch.int32 or packed.ndim != 2:  # noqa: PLR2004
            raise PackageError(
                f"tensor {name}_packed is {packed.dtype} {tuple(packed.shape)}: it must be INT32 in rows"
            )
        values = unpack(packed, int(shape.flatten()[1]))
    if values is None or values.dtype != torch.int8 or values.ndim != 2 or scale.numel() != len(values):  # noqa: PLR2004
        raise PackageError(f"{name} is not INT8 with one scale a row; other schemes cannot be read here")
    return dequantise(values, scale.reshape(-1, 1))


def pack(values: Tensor) -> Tensor:
    """Pack int8 [o, i] into int32 [o, ceil(i / 4)], the first value in the lowest byte."""
    unsigned = values.to(torch.int64) + ZERO_POINT  # 0 .. 255
    unsigned = functional.pad(unsigned, (0, -values.shape[1] % PER_WORD)).unflatten(1, (-1, PER_WORD))
    words = (unsigned << (8 * torch.arange(PER_WORD))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """Return the int8 [o, ``columns``] that ``pack`` has packed."""
    words = packed.to(torch.int64)[..., None] >> (8 * torch.arange(PER_WORD))
    return ((words & 0xFF).flatten(1)[:, :columns] - ZERO_POINT).to(torch.int8)


def _round_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a 16-bit type without ever getting smaller, or the largest value of a row would be clipped."""
    info = torch.finfo(dtype)
    return (scale * (1 + info.eps)).clamp(min=info.tiny).to(dtype)
