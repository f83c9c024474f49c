"""Turn fp32 master weights into what a package stores: 16-bit floats, and INT8 for the linears of the layers.

INT8 is symmetric, weight-only, with one scale per output channel: ``scale = max|w| / 127`` of the row. A search for a
better clipping point was tried and left out: on the rows of a real model and on Gaussian, Laplace and Student ones it
lowers the rounding error of 8 bits (0.8 % of a matrix's norm) by less than one percent of itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from deepspec.errors import DeepSpecError
from deepspec.nn.block import SwiGLU
from deepspec.nn.int8 import MAX_INT8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Profile = Literal["bf16", "fp16", "fp16_int8"]
FP16_STEP = 2.0**-24
"""Distance of the smallest fp16 numbers, where rounding is no longer relative."""
HALF = 0.501
"""Half a step, and a little for the rounding of the check itself."""
LAYERS = "layers."
"""Prefix of the decoder layers in the published names."""


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
    values = (weight.float() / scale).round().clamp(-MAX_INT8, MAX_INT8).to(torch.int8)
    return values, scale


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` in a 16-bit type.

    Raises:
        DeepSpecError: The tensor holds values that are not finite, or would overflow; the message names it.
    """
    check_finite(name, tensor)
    largest, limit = float(tensor.abs().max()) if tensor.numel() else 0.0, torch.finfo(dtype).max
    if largest > limit:
        raise DeepSpecError(
            f"tensor {name} holds {largest:.6g}, the largest {_short(dtype)} is {limit:.6g}: "
            "export.profile=bf16 can hold it"
        )
    return tensor.to(dtype)


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse a weight that is NaN or infinite."""
    if not bool(torch.isfinite(tensor).all()):
        raise DeepSpecError(f"tensor {name} holds values that are not finite: export another checkpoint of the run")


def layer_linears(drafter: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of the linears inside the decoder layers."""
    return tuple(
        f"{name}.weight"
        for name, module in drafter.named_modules()
        if name.startswith(LAYERS) and isinstance(module, nn.Linear) and module.bias is None
    )


def pack(weights: Mapping[str, Tensor], profile: Profile, int8: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return the tensors of a package from fp32 weights; those named in ``int8`` get a partner ``X_scale``.

    Tensors of integers stay as they are.
    """
    dtype = torch.bfloat16 if profile == "bf16" else torch.float16
    packed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            packed[name] = tensor
        elif name in int8:
            check_finite(name, tensor)
            packed[name], packed[f"{name}_scale"] = quantise_rows(tensor)
        else:
            packed[name] = cast(name, tensor, dtype)
    return {name: tensor.contiguous() for name, tensor in packed.items()}


def rounding_problems(
    weights: Mapping[str, Tensor], restored: Mapping[str, Tensor], profile: Profile, int8: tuple[str, ...] = ()
) -> list[str]:
    """List every tensor that a package gives back further from the trained weights than rounding explains."""
    eps = torch.finfo(torch.bfloat16 if profile == "bf16" else torch.float16).eps
    problems = []
    for name, trained in weights.items():
        if not trained.is_floating_point():
            problems += [] if restored[name].equal(trained) else [f"tensor {name} comes back changed from the package"]
            continue
        size = trained.float().abs()
        step = size.amax(dim=1, keepdim=True) / MAX_INT8 if name in int8 else eps * size + FP16_STEP
        excess = (restored[name].float() - trained.float()).abs() - HALF * step
        if bool((excess > 0).any()):
            problems.append(
                f"tensor {name} comes back from the package further off than rounding to {profile} explains"
            )
    return problems


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
