"""Load an inference package and bind it to its target.

Everything is checked before memory is taken, and every fault has a message that names it: checksums, the config's keys
and their agreement, the target, and each tensor's name, shape and type against what the drafter needs. Nothing in a
package is executed: there is no pickle, ``auto_map`` is not followed, and a drafter from outside DeepSpec is only built
when the caller names its class.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deepspec.drafters.files import read_drafter_config, read_header
from deepspec.drafters.registry import TARGET_KEY, drafter_to_dict
from deepspec.errors import PackageError
from deepspec.inference.package_checks import (
    BindableTarget,
    build_drafter,
    check_files,
    check_header,
    check_target,
    check_tensors,
    check_vocabulary,
)
from deepspec.inference.package_config import CONFIG, WEIGHTS, PackageConfig, read_config
from deepspec.inference.profiles import SCALE, part_of
from deepspec.nn.int8 import MAX_INT8, Int8DynamicLinear, Int8Linear, int8_kernel_pays

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.profiles import QuantisedGroup
    from deepspec.nn.head import FrozenHead

OWN_DRAFTER = re.compile(r"deepspec\.drafters\.[a-z0-9_]+\.config\.[A-Za-z0-9]+")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def is_package(path: str | Path) -> bool:
    """Whether ``path`` looks like a package folder."""
    return (Path(path) / CONFIG).is_file() and (Path(path) / WEIGHTS).is_file()


def load_package(
    path: str | Path,
    target: BindableTarget,
    *,
    dtype: torch.dtype | None = None,
    allow_other_target: bool = False,
    multiplied_out: bool = False,
    trusted_drafters: tuple[str, ...] = (),
) -> Drafter:
    """Load a package, check it, and return its drafter bound to ``target``, ready to propose.

    Args:
        path: The package's folder.
        target: The target that verifies the drafts; the drafter uses its embedding and head.
        dtype: Precision to run in; None takes the target's when that is a float type, else the package's own.
        allow_other_target: Accept another revision of the target than the one trained with (same shapes).
        multiplied_out: Hold every weight as floats and round no activations, to go on training from them.
        trusted_drafters: Dotted paths of configuration classes outside DeepSpec that may be imported.

    Raises:
        PackageError: With the file, key or tensor that is wrong.
    """
    folder = Path(path)
    check_files(folder)
    config = read_config(folder)
    check_target(config.target, target, allow_other_target)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            check_header(config, weights.metadata() or {}, folder / WEIGHTS)
            drafter_config = _drafter_config(config, trusted_drafters)
            check_tensors(config, drafter_config, read_header(folder / WEIGHTS))
            tensors = {name: weights.get_tensor(name) for name in weights.keys()}
    except (OSError, SafetensorError) as error:
        raise PackageError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    _check_values(tensors)
    check_vocabulary(config, tensors)
    drafter = build_drafter(config, drafter_config)
    chosen, device = _run_dtype(config, target.head, dtype), target.head.weight.device
    _fill(drafter, config, tensors, chosen, device, multiplied_out=multiplied_out)
    drafter.bind(target.head)
    return drafter.eval().requires_grad_(False)


def _drafter_config(config: PackageConfig, trusted: tuple[str, ...]) -> DrafterConfig:
    name = str(config.drafter.get(TARGET_KEY))
    if not OWN_DRAFTER.fullmatch(name) and name not in trusted:
        raise PackageError(
            f"{CONFIG}: drafter.{TARGET_KEY}={name!r} is not a drafter of DeepSpec, and a package "
            "runs no code of its own: pass the name in trusted_drafters if you trust it"
        )
    drafter_config = read_drafter_config(config.drafter, CONFIG)
    missing = [key for key in drafter_to_dict(drafter_config) if key not in config.drafter]
    if missing:
        raise PackageError("\n".join(f"{CONFIG}: drafter.{key} is missing" for key in missing))
    return drafter_config


def _check_values(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PackageError(f"{WEIGHTS}: tensor {name} holds values that are not finite")
        if tensor.dtype == torch.int8 and bool((tensor < -MAX_INT8).any()):
            raise PackageError(f"{WEIGHTS}: tensor {name} holds {-MAX_INT8 - 1}, outside -{MAX_INT8} .. {MAX_INT8}")
        if name.endswith(SCALE) and not bool((tensor > 0).all()):
            raise PackageError(f"{WEIGHTS}: tensor {name} holds scales that are not above 0")


def _fill(
    drafter: Drafter,
    config: PackageConfig,
    tensors: dict[str, Tensor],
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
