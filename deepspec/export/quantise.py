"""Turn fp32 master weights into what a package stores: 16-bit floats, and integers of 8 or 4 bits with scales.

INT8 is symmetric with one scale per output channel: ``scale = max|w| / 127`` of the row. A search for a better
clipping point was tried and left out: on the rows of a real model and on Gaussian, Laplace and Student ones it lowers
the rounding error of 8 bits (0.8 % of a matrix's norm) by less than one percent of itself.

INT4 is symmetric with one scale for each group of columns. Here a search pays, for the range -8 .. 7 is not: a group
whose largest value is negative uses all 16 numbers with ``scale = max|w| / 8``. See ``quantise_groups``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from deepspec.errors import DeepSpecError
from deepspec.inference.profiles import INT4, SCALE
from deepspec.nn.block import SwiGLU
from deepspec.nn.int4 import MAX_INT4, MIN_INT4, pack_int4
from deepspec.nn.int8 import MAX_INT8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from deepspec.inference.package_config import PackageConfig
    from deepspec.inference.profiles import Int4Group, QkvStorage, QuantisedGroup

CLIPPING = (1.0, 0.95, 0.9, 7 / 8, 0.85, 0.8, 0.75, 0.7, 0.65)
"""Shares of ``max|w| / 7`` that are tried as the scale of a group of 4-bit values."""
SMALLEST_FP16 = 2.0**-24


@dataclass(frozen=True)
class Formats:
    """What bends a profile: the keys of the group ``export`` of the same names."""

    qkv: QkvStorage = "int8"
    int4_group: Int4Group = 32
    overflow: Literal["refuse", "bf16"] = "refuse"


@torch.no_grad()
def balance(drafter: nn.Module) -> None:
    """Rewrite the MLPs in place so that the columns of ``down`` fill the range of their rows; outputs stay the same.

    ``down(silu(gate x) * up x)`` does not change when row u of ``up`` is multiplied by s_u and column u of ``down``
    divided by it. INT8 has a scale for each row, so this costs ``up`` nothing, and units of small activation and large
    weight no longer decide how coarse ``down`` is for all others. Fitted layers have such units.
    """
    for module in drafter.modules():
        if isinstance(module, SwiGLU):
            up, down = module.up_proj.weight, module.down_proj.weight
            size = down.float().abs()
            tiny = torch.finfo(torch.float32).tiny
            share = (size / size.amax(1, keepdim=True).clamp(min=tiny)).amax(0)  # [intermediate]
            if not bool(torch.isfinite(share).all()):
                continue  # refused by name when it is packed
            scale = torch.where(share > 0, share, torch.ones_like(share))
            up.mul_(scale[:, None])
            down.div_(scale)


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``values`` [o, i] int8 and ``scale`` [o, 1] fp32 with ``weight`` [o, i] close to ``values * scale``."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)  # [o, 1]
    smallest = torch.finfo(torch.float32).tiny * MAX_INT8
    scale = torch.where(largest > smallest, largest / MAX_INT8, torch.ones_like(largest))
    return round_rows(weight, scale), scale


def round_rows(weight: Tensor, scale: Tensor) -> Tensor:
    """Return ``weight`` [o, i] in steps of ``scale`` [o, 1] as int8 [o, i]."""
    return (weight.float() / scale).round().clamp(-MAX_INT8, MAX_INT8).to(torch.int8)


def quantise_groups(name: str, weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return ``packed`` [o, i/2] uint8 and ``scale`` [o, i/group] fp16 of ``weight`` [o, i].

    Each group takes the scale among ``CLIPPING`` that leaves the least squared error: rounding to nearest at
    ``max|w| / 7`` is among them, so no group is worse off than by that.

    Raises:
        DeepSpecError: fp16 cannot hold a scale; the message names the tensor.
    """
    values, scale = search_groups(name, weight.float().unflatten(1, (-1, group)))  # [o, i/g, g]
    return pack_int4(values.to(torch.int8).flatten(1)), scale.squeeze(-1).half()


def search_groups(name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [o, n, g] of groups ``rows`` and the scales [o, n, 1] that leave the least squared error.

    Raises:
        DeepSpecError: fp16 cannot hold a scale; the message names the tensor.
    """
    largest = rows.abs().amax(-1, keepdim=True)
    if float(largest.max()) > MAX_INT4 * torch.finfo(torch.float16).max:
        raise DeepSpecError(
            f"tensor {name} holds {float(largest.max()):.6g}, whose 4-bit scale fp16 cannot hold: "
            "export.profile=fp16_int8 can"
        )
    best, least = _rounded(rows, largest, CLIPPING[0])
    for share in CLIPPING[1:]:
        candidate, error = _rounded(rows, largest, share)
        better = error < least  # [o, n, 1]
        best = (torch.where(better, candidate[0], best[0]), torch.where(better, candidate[1], best[1]))
        least = torch.minimum(error, least)
    return best


def _rounded(rows: Tensor, largest: Tensor, share: float) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Round ``rows`` [o, n, g]; return the values, their scale [o, n, 1] as fp16 holds it, and the squared error."""
    scale = (largest * (share / MAX_INT4)).half().float().clamp(min=SMALLEST_FP16)
    values = (rows / scale).round().clamp(MIN_INT4, MAX_INT4)
    return (values, scale), (values * scale - rows).square().sum(-1, keepdim=True)


def wide_tensors(weights: Mapping[str, Tensor], quantised: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the tensors, not ``quantised`` ones, that hold values beyond fp16."""
    limit = torch.finfo(torch.float16).max
    kept = {name: t for name, t in weights.items() if name not in quantised and t.is_floating_point() and t.numel()}
    return tuple(name for name, tensor in kept.items() if limit < float(tensor.abs().max()) < float("inf"))


KEEP_WIDE = "export.profile=bf16 can hold it, export.overflow=bf16 keeps this one in bf16"


def cast(name: str, tensor: Tensor, dtype: torch.dtype, advice: str = KEEP_WIDE) -> Tensor:
    """Return ``tensor`` in a 16-bit type.

    Raises:
        DeepSpecError: The tensor holds values that are not finite, or would overflow; the message names it, and ends
            with the ``advice``.
    """
    check_finite(name, tensor)
    largest, limit = float(tensor.abs().max()) if tensor.numel() else 0.0, torch.finfo(dtype).max
    if largest > limit:
        raise DeepSpecError(f"tensor {name} holds {largest:.6g}, the largest {_short(dtype)} is {limit:.6g}: {advice}")
    return tensor.to(dtype)


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a weight that is NaN or infinite."""
    if not bool(torch.isfinite(tensor).all()):
        raise DeepSpecError(f"tensor {name} holds values that are not finite: export another checkpoint of the run")


def pack(
    weights: Mapping[str, Tensor],
    config: PackageConfig,
    rounded: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a package from fp32 weights, as ``config`` says; a quantised X gets a partner ``X_scale``.

    Tensors of integers stay as they are. ``rounded`` holds values and scales of matrices that were rounded beforehand.
    """
    groups = config.groups
    packed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            packed[name] = tensor
        elif name in groups:
            given = (rounded or {}).get(name)
            packed[name], packed[f"{name}{SCALE}"] = given or quantise(name, tensor, groups[name])
        else:
            packed[name] = cast(name, tensor, getattr(torch, config.dtype_of(name)))
    return {name: tensor.contiguous() for name, tensor in packed.items()}


def quantise(name: str, weight: Tensor, group: QuantisedGroup) -> tuple[Tensor, Tensor]:
    """Return what stands in a file for ``weight`` [o, i]: its values and scales, in the group's scheme."""
    check_finite(name, weight)
    if group.group is None:
        return quantise_rows(weight)
    if group.scheme == INT4:
        return quantise_groups(name, weight, group.group)
    values, scale = quantise_rows(weight.reshape(-1, group.group))  # a group is a row of its own
    return values.view_as(weight), scale.view(len(weight), -1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
