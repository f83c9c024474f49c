"""Which parameter is updated how.

Matrices decay; norms, biases and embeddings (every parameter of one dimension, and the tables of ``nn.Embedding``) do
not. Under Muon the matrices go to Muon and the rest to AdamW. Each group carries its ``peak_lr``; the loop's schedule
scales all of them by one factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deepspec.config.schema import OptimConfig


def split_parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters as (matrices, the rest), each in the module's order."""
    tables = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        # "markov_w1" is used as a table although it may be stored by another class than nn.Embedding.
        is_matrix = _ndim(parameter) >= 2 and id(parameter) not in tables and "markov_w1" not in name  # noqa: PLR2004
        (matrices if is_matrix else rest).append(parameter)
    return matrices, rest


def _ndim(parameter: nn.Parameter) -> int:
    """Return the dimensions of a parameter, also of one that ZeRO-3 has already split."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def parameter_groups(module: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return AdamW's groups; an empty one is left out."""
    matrices, rest = split_parameters(module)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "lr": config.lr, "peak_lr": config.lr},
        {"params": rest, "weight_decay": 0.0, "lr": config.lr, "peak_lr": config.lr},
    ]
    return [group for group in groups if group["params"]]


def make_adamw(groups: Iterable[dict[str, Any]], config: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW. The fused kernel is asked for by name: it can leave out a step without the host waiting."""
    return torch.optim.AdamW(list(groups), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def make_optimizers(module: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """Build the optimisers of the plain engine."""
    if config.name == "adamw":
        return [make_adamw(parameter_groups(module, config), config)]
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optim.name=muon needs torch.optim.Muon, which torch {torch.__version__} lacks; use adamw")
    matrices, rest = split_parameters(module)
    flat = [p for p in matrices if _ndim(p) == 2]  # noqa: PLR2004
    rest += [p for p in matrices if _ndim(p) != 2]  # noqa: PLR2004
    optimizers: list[torch.optim.Optimizer] = []
    if flat:
        muon = torch.optim.Muon(flat, lr=config.muon_lr, weight_decay=config.weight_decay)
        muon.param_groups[0]["peak_lr"] = config.muon_lr
        optimizers.append(muon)
    if rest:
        group = {"params": rest, "weight_decay": 0.0, "lr": config.lr, "peak_lr": config.lr}
        optimizers.append(make_adamw([group], config))
    return optimizers


def set_lr(optimizer: torch.optim.Optimizer, lr_factor: float) -> None:
    """Set every group's rate to its peak times ``lr_factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * lr_factor


def moment_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that an optimiser keeps for each parameter."""
    return ("exp_avg", "exp_avg_sq") if isinstance(optimizer, torch.optim.AdamW) else ("momentum_buffer",)


def checked_moments(
    moments: Mapping[str, Mapping[str, torch.Tensor]], name: str, keys: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the moments of one parameter.

    Raises:
        ConfigError: the checkpoint was written under another optimiser.
    """
    found = moments.get(name, {})
    missing = [key for key in keys if key not in found]
    if missing:
        raise ConfigError(
            f"the checkpoint has {sorted(found)} for parameter {name}, this optimiser needs {missing}: "
            "optim.name differs from the run that wrote it; set it back, or start anew with train.resume=false"
        )
    return {key: found[key] for key in keys}
