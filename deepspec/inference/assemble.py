"""From the tensors of a package to a drafter that is ready to propose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.errors import PackageError
from deepspec.inference.package_checks import build_drafter
from deepspec.inference.package_config import CONFIG, PackageConfig
from deepspec.inference.profiles import SCALE, part_of
from deepspec.nn.int8 import Int8DynamicLinear, Int8Linear, int8_kernel_pays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.profiles import QuantisedGroup
    from deepspec.nn.head import FrozenHead

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def assemble(
    config: PackageConfig,
    drafter_config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    head: FrozenHead,
    *,
    dtype: torch.dtype | None = None,
    multiplied_out: bool = False,
) -> Drafter:
    """Build the drafter of ``config``, fill it with ``tensors`` (checked ones) and bind it to ``head``, on its device.

    Args:
        config: The package's.
        drafter_config: The drafter's, out of it.
        tensors: Those of the drafter, as they are stored.
        head: The target's.
        dtype: Precision to run in; None takes the target's when that is a float type, else the package's own.
        multiplied_out: Hold every weight as floats and round no activations.

    Raises:
        PackageError: ``dtype`` cannot hold what the package says is too large for it.
    """
    drafter = build_drafter(config, drafter_config)
    chosen, device = _run_dtype(config, head, dtype), head.weight.device
    _fill(drafter, config, tensors, chosen, device, multiplied_out=multiplied_out)
    drafter.bind(head)
    return drafter.eval().requires_grad_(False)


def _fill(
    drafter: Drafter,
    config: PackageConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    multiplied_out: bool,
) -> None:
    """Put the weights in place, quantised ones as they are where the numbers or the time ask for it, and move them."""
    groups = config.groups
    state: dict[str, Tensor] = {}
    for name in (n for n in tensors if n.removesuffix(SCALE) not in groups):
        state[name] = tensors[name].to(dtype) if tensors[name].is_floating_point() else tensors[name]
    for name, group in groups.items():
        values, scale = tensors[name], tensors[f"{name}{SCALE}"]
        kind = None if multiplied_out else _module_for(name, group, dtype, device)
        if kind is None:
            state[name] = group.weight(values, scale, dtype)
        else:
            _replace(drafter, name.removesuffix(".weight"), kind(values, scale))
            state |= {name: values, f"{name}{SCALE}": scale}
    drafter.load_state_dict(state, strict=True, assign=True)
    drafter.to(device)


def _module_for(
    name: str, group: QuantisedGroup, dtype: torch.dtype, device: torch.device
) -> type[Int8Linear | Int8DynamicLinear] | None:
    """Return the module that multiplies with the stored values of a tensor; None: its weight is multiplied out.

    Fusion and Markov matrices are multiplied out everywhere: their drafters read those weights as they are.
    """
    if group.bits != 8 or part_of(name) in {"fusion", "markov"}:  # noqa: PLR2004 - bits
        return None
    if group.activations == "int8_per_token":
        return Int8DynamicLinear
    return Int8Linear if int8_kernel_pays(device, dtype) else None


def _replace(drafter: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(drafter.get_submodule(parent), child, module)


def _run_dtype(config: PackageConfig, head: FrozenHead, asked: torch.dtype | None) -> torch.dtype:
    """Return the precision to run in: the one asked for, else the target's, else the package's own."""
    own = head.weight.dtype if head.weight.is_floating_point() else DTYPES[config.dtype]
    if not config.bfloat16 or (asked or own) != torch.float16:
        return asked or own
    if asked is None:
        return torch.bfloat16
    named = ", ".join((*config.bfloat16.tensors, *config.bfloat16.states))
    raise PackageError(f"{CONFIG}: bfloat16 names {named}, which fp16 cannot hold: load it in bf16 or fp32")
