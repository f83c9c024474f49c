"""DeepSpeed's own configuration, from ours: plain values only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deepspec.engine.update import GROWTH_INTERVAL

if TYPE_CHECKING:
    from deepspec.config.schema import EngineConfig, OptimConfig

MAX_BUCKET_ELEMENTS = 1 << 27
BUCKET_STEP = 1 << 10  # DeepSpeed wants even sizes


def deepspeed_config(engine: EngineConfig, optim: OptimConfig, world_size: int, num_parameters: int) -> dict[str, Any]:
    """Return the dict that ``deepspeed.initialize`` takes."""
    accumulation = max(1, engine.global_batch_size // (engine.micro_batch_size * world_size))
    bucket = min(MAX_BUCKET_ELEMENTS, math.ceil(num_parameters / BUCKET_STEP) * BUCKET_STEP)
    config: dict[str, Any] = {
        "train_batch_size": engine.micro_batch_size * world_size * accumulation,  # checked there, and used for nothing
        "train_micro_batch_size_per_gpu": engine.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "managed_gradient_accumulation": False,
        "gradient_clipping": optim.clip_norm if engine.zero_stage > 0 else 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": engine.zero_stage,
            "overlap_comm": engine.zero_stage >= 2,  # noqa: PLR2004 - stage 1 reduces in step()
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "memory_efficient_linear": False,  # it would replace torch's linear for the target, too
        },
        "steps_per_print": None,
    }
    if engine.zero_stage > 0 and engine.precision == "bf16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    if engine.zero_stage > 0 and engine.precision == "fp16":
        config["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": round(math.log2(engine.initial_loss_scale)),
            "loss_scale_window": GROWTH_INTERVAL,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    return config
