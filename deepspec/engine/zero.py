"""DeepSpeed ZeRO, stages 0 to 3, behind the same interface as the plain engine. The only file that imports deepspeed.

What it takes to equal the plain twin:

* DeepSpeed averages gradients over ranks, the loop wants sums: the loss is multiplied by the world size.
* Reduction and accumulation are fp32, also when the drafter computes in bf16 or fp16. Stage 0 cannot accumulate in fp32
  by itself, so there the parameters stay fp32 and each call sees low-precision copies, as in the plain engine.
* DeepSpeed forms its fp32 masters from the rounded low-precision weights; they are set to the true ones.
* ``managed_gradient_accumulation`` is off: ``step`` is the boundary, however many backward passes came before.
* ZeRO-3 gathers a parameter only inside the forward pass of its module, so everything runs inside ``LossModule``.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import warnings
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import torch

from deepspec.checkpoint.state import TrainState
from deepspec.engine.base import DTYPES, LossModule, StepInfo
from deepspec.engine.optim import (
    ADAMW_MOMENTS,
    checked_moments,
    export_moments,
    import_moments,
    make_optimizers,
    set_lr,
)
from deepspec.engine.update import GROWTH_INTERVAL, LossScaler, Update, gradient_of
from deepspec.engine.zero_config import deepspeed_config
from deepspec.errors import ConfigError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from types import ModuleType

    from deepspec.config.schema import EngineConfig, OptimConfig
    from deepspec.contracts import Batch, Features, LossOutput
    from deepspec.drafters.base import Drafter
    from deepspec.engine.distributed import Ranks

log = get_logger(__name__)


def import_deepspeed(ranks: Ranks) -> ModuleType:
    """Import DeepSpeed for the kind of device in use, with its log on standard error.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # it insists, also on a single process
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            'engine=deepspeed needs the package deepspeed: pip install "deepspec[train]", or set engine=plain'
        ) from error
    # On the CPU DeepSpeed would compile a shared-memory all-reduce at start-up, which needs a compiler and minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"torch\.distributed\."
    )  # DeepSpeed's calls, every step
    logger = deepspeed.utils.logger
    logger.setLevel(logging.WARNING)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


class _Guarded(torch.optim.Optimizer):
    """What DeepSpeed steps at stage 0, where it neither checks nor scales: the plain engine's update of ``inner``."""

    def __init__(self, inner: torch.optim.Optimizer, update: Update) -> None:
        super().__init__(inner.param_groups, {})  # the groups are shared: rates are set once
        self._inner, self._update = inner, update
        self.info: StepInfo | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Clip, skip what is not finite, and update."""
        grads = [gradient_of(p) for group in self.param_groups for p in group["params"]]
        self.info = self._update(grads, [self._inner])


class ZeroEngine:
    """DeepSpeed around a drafter."""

    def __init__(self, drafter: Drafter, *, ranks: Ranks, engine: EngineConfig, optim: OptimConfig) -> None:
        self.ranks = ranks
        _refuse_other_optimisers(engine, optim)
        self._deepspeed = import_deepspeed(ranks)
        _refuse_missing_fp16(self._deepspeed, engine)
        self._stage = engine.zero_stage
        masters = {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in drafter.named_parameters()}
        self._drafter = drafter.to(ranks.device)
        dtype = DTYPES[engine.precision]
        module = LossModule(drafter, compute=dtype, cast_to=dtype if self._stage == 0 else None)
        self._scaler = None
        if engine.precision == "fp16" and self._stage == 0:
            self._scaler = LossScaler(engine.initial_loss_scale, ranks.device)
        (self._inner,) = make_optimizers(drafter, optim)
        self._guarded = _Guarded(self._inner, Update(optim.clip_norm, self._scaler)) if self._stage == 0 else None
        with redirect_stdout(
            sys.stderr if log.isEnabledFor(logging.DEBUG) else io.StringIO()
        ):  # it prints what belongs into a log
            self._engine, *_ = self._deepspeed.initialize(
                model=module,
                optimizer=self._guarded or self._inner,
                config=deepspeed_config(engine, optim, ranks.world_size, sum(p.numel() for p in masters.values())),
                dist_init_required=False,
            )
        self._named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        scaler: Any = getattr(self._engine.optimizer, "loss_scaler", None)
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False  # the loop counts bad steps and stops with a clear message
        if self._stage > 0:
            self._create_moments()
        if dtype != torch.float32 and self._stage > 0:
            self._set_parameters(masters)

    def module(self, batch: Batch, features: Features) -> LossOutput:
        """Run the drafter's objective through DeepSpeed's hooks."""
        output: LossOutput = self._engine(batch, features)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of ``loss``; DeepSpeed divides by the world size when it reduces."""
        loss = loss * self.ranks.world_size
        self._engine.backward(loss if self._scaler is None else loss * self._scaler.scale, scale_wrt_gas=False)

    def step(self, lr_factor: float) -> StepInfo:
        """Let DeepSpeed reduce, clip and update."""
        set_lr(self._inner, lr_factor)
        scale = float(getattr(self._engine.optimizer, "loss_scale", 1.0))
        self._engine.step()
        if self._guarded is not None and self._guarded.info is not None:
            return self._guarded.info
        device, norm = self.ranks.device, self._engine.get_global_grad_norm()
        return StepInfo(
            grad_norm=torch.as_tensor(math.nan if norm is None else norm, dtype=torch.float32, device=device),
            skipped=torch.tensor(float(not self._engine.was_step_applied()), device=device),
            loss_scale=torch.tensor(scale, device=device),
        )

    # State -----------------------------------------------------------------------------------------------------------

    def export_state(self) -> TrainState:
        """Gather masters and moments, one parameter at a time, and keep them on the first rank only."""
        parameters: dict[str, torch.Tensor] = {}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, parameter in self._named.items():
            master = self._gathered(parameter, None)
            state = {key: self._gathered(parameter, key) for key in ADAMW_MOMENTS} if self._stage > 0 else {}
            if self.ranks.is_first:
                parameters[name], moments[name] = master.cpu().clone(), {k: v.cpu().clone() for k, v in state.items()}
        if not self.ranks.is_first:
            return TrainState()
        parameters |= {n: b.detach().to("cpu", copy=True) for n, b in self._buffers().items()}
        if self._stage == 0:
            moments, optimizer_step = export_moments([self._inner], self._named)
        else:
            optimizer_step = max(int(state["step"]) for state in self._inner.state.values())
        return TrainState(parameters, moments, optimizer_step, self._loss_scale_state())

    def _gathered(self, parameter: torch.nn.Parameter, key: str | None) -> torch.Tensor:
        """Return a whole fp32 master (``key`` None) or, from stage 1 on, moment (collective)."""
        if self._stage == 0:
            whole = parameter
        elif key is None:
            whole = self._deepspeed.utils.safe_get_full_fp32_param(parameter)
        else:
            whole = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return whole.detach().float().view(getattr(parameter, "ds_shape", parameter.shape))

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return what the drafter saves besides its trainable parameters."""
        return {n: v for n, v in self._drafter.state_dict().items() if n not in self._named}

    def _loss_scale_state(self) -> dict[str, float]:
        if self._scaler is not None:
            return self._scaler.state()
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if scaler is None or not getattr(scaler, "dynamic", False):
            return {}
        good_steps = (scaler.cur_iter - scaler.last_overflow_iter - 1) % GROWTH_INTERVAL
        return {"scale": float(scaler.cur_scale), "good_steps": float(good_steps)}

    def import_state(self, state: TrainState) -> None:
        """Take over a state that any engine exported."""
        self._set_parameters({name: state.parameters[name] for name in self._named})
        self._drafter.load_state_dict({name: state.parameters[name] for name in self._buffers()}, strict=False)
        if self._stage == 0:
            import_moments(self._inner, self._named, state)
        elif state.moments:
            for entry in self._inner.state.values():
                entry["step"].fill_(state.optimizer_step)
            for name, parameter in self._named.items():
                for key, value in checked_moments(state.moments, name, ADAMW_MOMENTS).items():
                    self._set_state(parameter, value, key)
        self._set_loss_scale(state.loss_scale)

    def _set_parameters(self, values: dict[str, torch.Tensor]) -> None:
        """Set the fp32 masters and the parameters that the forward pass reads."""
        for name, parameter in self._named.items():
            if self._stage > 0:
                self._set_state(parameter, values[name], None)
            if self._stage == 3:  # noqa: PLR2004
                with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if self.ranks.is_first:
                        parameter.data.copy_(values[name])
            else:
                parameter.data.copy_(values[name])

    def _set_state(self, parameter: torch.nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        """Set a master (``key`` None) or a moment of stages 1 to 3 from its whole value."""
        value, utils = value.to(self.ranks.device, torch.float32), self._deepspeed.utils
        if self._stage == 3:  # noqa: PLR2004
            own = _own_part(parameter, value, self.ranks)
            if key is None:
                utils.safe_set_local_fp32_param(parameter, own)
            else:
                utils.safe_set_local_optimizer_state(parameter, own, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)

    def _create_moments(self) -> None:
        """Create the optimiser's tensors and link DeepSpeed's views to them.

        DeepSpeed would do so in the first step, and then link the first parameter group only (stages 1 and 2).
        """
        flat = getattr(self._engine.optimizer, "fp32_partitioned_groups_flat", None)  # stage 3 empties its groups
        if flat is None:
            flat = [p for group in self._inner.param_groups for p in group["params"]]
        for partition in flat:
            step = torch.zeros((), device=partition.device)
            moments = {key: torch.zeros_like(partition.data) for key in ADAMW_MOMENTS}
            self._inner.state[partition] = {"step": step, **moments}
        link = getattr(self._engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()

    def _set_loss_scale(self, state: dict[str, float]) -> None:
        if self._scaler is not None:
            self._scaler.load(state)
            return
        scaler: Any = getattr(self._engine.optimizer, "loss_scaler", None)
        if state and getattr(scaler, "dynamic", False):
            scaler.cur_scale = state["scale"]
            scaler.cur_iter = int(state["good_steps"])
            scaler.last_overflow_iter = -1


def _own_part(parameter: Any, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return this rank's share of a parameter that ZeRO-3 splits evenly, the last share padded with zeros."""
    size = parameter.partition_numel()
    padded = whole.new_zeros(size * ranks.world_size)
    padded[: whole.numel()] = whole.flatten()
    return padded[size * ranks.rank : size * (ranks.rank + 1)]


def _refuse_other_optimisers(engine: EngineConfig, optim: OptimConfig) -> None:
    """Say what the config's rules say, to a caller that did not ask them."""
    if optim.name == "muon":
        raise ConfigError("optim.name=muon runs on the plain engine only; set optim=adamw or engine=plain")
    if optim.name == "adamw8bit" and engine.zero_stage > 0:
        raise ConfigError(
            f"optim.name=adamw8bit with engine.zero_stage={engine.zero_stage}: 8-bit moments are those of whole "
            "parameters; set engine.zero_stage=0, or optim=adamw"
        )


def _refuse_missing_fp16(deepspeed: ModuleType, engine: EngineConfig) -> None:
    """Say what DeepSpeed would say later and less clearly."""
    supported = deepspeed.accelerator.get_accelerator().is_fp16_supported()
    if engine.precision == "fp16" and engine.zero_stage > 0 and not supported:
        raise ConfigError(
            f"engine.precision=fp16 with engine.zero_stage={engine.zero_stage}: DeepSpeed has no fp16 on this device; "
            "use engine.precision=bf16, or engine.zero_stage=0"
        )
