"""Which parameter is updated how.

Matrices decay; norms, biases and embeddings (every parameter of one dimension, and the tables of ``nn.Embedding``) do
not. Under Muon the matrices go to Muon and the rest to AdamW. Each group carries its ``peak_lr``; the loop's schedule
scales all of them by one factor.

Where an engine holds whole parameters, ``export_moments`` and ``import_moments`` carry the optimisers' tensors to a
checkpoint and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspec.engine.adamw8bit import make_adamw8bit, moment_layout
from deepspec.errors import ConfigError, PackageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from deepspec.checkpoint.state import TrainState
    from deepspec.config.schema import OptimConfig

ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """Build the optimisers of whole parameters."""
    if config.name == "adamw":
        return [make_adamw(parameter_groups(module, config), config)]
    if config.name == "adamw8bit":
        return [make_adamw8bit(parameter_groups(module, config), config)]
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


def export_moments(
    optimizers: Iterable[torch.optim.Optimizer], named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    """Copy the moments to the host; the second value counts the updates that were taken."""
    names = {id(parameter): name for name, parameter in named.items()}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    steps = [0]
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            moments[names[id(parameter)]] = {
                key: value.detach().to("cpu", copy=True) for key, value in state.items() if key != "step"
            }
            steps.append(int(state.get("step", 0)))
    return moments, max(steps)


def import_moments(optimizer: torch.optim.Optimizer, named: Mapping[str, nn.Parameter], state: TrainState) -> None:
    """Set moments and counters of the parameters that ``optimizer`` updates; without moments it starts afresh."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in named.items():
        if id(parameter) not in own:
            continue
        optimizer.state[parameter] = {}
        if state.moments:
            layout = _layout(optimizer, parameter)
            found = checked_moments(state.moments, name, layout)
            for key, value in found.items():
                _check_layout(f"{key} of {name}", value, layout[key])
            optimizer.state[parameter] = {k: v.to(parameter.device, copy=True) for k, v in found.items()}
            optimizer.state[parameter] |= _counter(optimizer, parameter, state.optimizer_step)


def _layout(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of every tensor that ``optimizer`` keeps for ``parameter``."""
    whole = (parameter.dtype, tuple(parameter.shape))
    if isinstance(optimizer, torch.optim.AdamW):
        return dict.fromkeys(ADAMW_MOMENTS, whole)
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer": whole}
    return moment_layout(parameter)


def _check_layout(what: str, value: torch.Tensor, expected: tuple[torch.dtype, tuple[int, ...]]) -> None:
    """Look before bitsandbytes does: it reads memory by sizes that it expects.

    Raises:
        PackageError: another version of this program wrote the checkpoint, or it was changed.
    """
    found = (value.dtype, tuple(value.shape))
    if found != expected:
        raise PackageError(
            f"the checkpoint's {what} has type {found[0]} and shape {list(found[1])}, this optimiser needs "
            f"{expected[0]} and {list(expected[1])}; start anew with train.resume=false"
        )


def _counter(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, step: int) -> dict[str, Any]:
    """Return the step counter in the form that ``optimizer`` counts with; Muon does not count."""
    if isinstance(optimizer, torch.optim.Muon):
        return {}
    if isinstance(optimizer, torch.optim.AdamW):
        return {"step": torch.tensor(float(step), device=parameter.device)}
    return {"step": step}
