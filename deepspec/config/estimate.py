"""What a run will cost: memory a rank, disk, and hours, from the config alone.

The drafter's parameters are counted on PyTorch's meta device, so the count is exact for every drafter and takes no
memory. Activations and time are estimates; each line says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.config.known_targets import TargetShape, target_shape
from deepspec.contracts import TargetInfo
from deepspec.targets.layers import auto_layer_ids

if TYPE_CHECKING:
    from deepspec.config.schema import RunConfig

GIB = 2**30
LOSS_ROWS = 1024  # rows of logits that live at a time
ACTIVATIONS_PER_LAYER = 16  # tensors of width D kept for the backward pass of one drafter layer
PACKAGE_WIDTH = {"fp16_int8": 1.5, "fp16_int8_full": 1.1, "int8_dynamic": 1.5, "int4_mlp": 1.2}
"""About the bytes of a drafter's parameter in a package, 2 in the other profiles."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Sizes in bytes, time in hours."""

    target_parameters: int
    drafter_parameters: int
    memory: dict[str, float]  # part -> bytes on one rank
    disk: dict[str, float]  # part -> bytes
    steps: int
    hours: float
    shares: dict[str, float]  # part -> share of the time
    assumptions: tuple[str, ...]


def estimate(run: RunConfig) -> Estimate:
    """Return what a run will cost."""
    shape = target_shape(run.target.path)
    ids = run.target.target_layer_ids
    layer_ids = auto_layer_ids(shape.num_layers) if ids == "auto" else ids
    drafter = _drafter_parameters(run, shape, layer_ids)
    samples, tokens, assumptions = _amount(run)
    steps = max(1, samples * run.train.epochs // run.engine.global_batch_size)
    steps = min(steps, run.train.max_steps or steps)
    work = _work(run, shape, drafter, tokens)
    total = sum(work.values()) * steps * run.engine.global_batch_size  # FLOP
    return Estimate(
        target_parameters=shape.parameters,
        drafter_parameters=drafter,
        memory=_memory(run, shape, drafter, len(layer_ids), tokens),
        disk=_disk(run, shape, drafter, samples * tokens),
        steps=steps,
        hours=total / (max(run.plan.tflops, 1e-9) * 1e12 * run.plan.ranks) / 3600,
        shares={name: part / sum(work.values()) for name, part in work.items()},
        assumptions=assumptions,
    )


def report(run: RunConfig, found: Estimate) -> str:
    """Return the estimate as text for a person."""
    lines = [
        f"target   {run.target.path}: {found.target_parameters / 1e6:,.0f} M parameters, frozen",
        f"drafter  {found.drafter_parameters / 1e6:,.1f} M trained parameters, gamma {run.drafter.gamma}",
        "",
        *_table(f"memory of one rank ({run.plan.ranks} in all)", found.memory),
        "",
        *_table("disk", found.disk),
        "",
        f"time     {found.steps:,} optimiser steps, about {found.hours:,.1f} hours "
        f"at plan.tflops={run.plan.tflops:g} a rank",
        "         " + ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items()),
        "",
        "assumed  " + "; ".join(found.assumptions),
    ]
    return "\n".join(lines)


def _table(title: str, parts: dict[str, float]) -> list[str]:
    rows = [f"  {name:<44} {size / GIB:9.2f} GiB" for name, size in parts.items()]
    return [title, *rows, f"  {'together':<44} {sum(parts.values()) / GIB:9.2f} GiB"]


def _drafter_parameters(run: RunConfig, shape: TargetShape, layer_ids: tuple[int, ...]) -> int:
    import torch

    info = TargetInfo(
        name=run.target.name, model_type="", vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        num_layers=shape.num_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size, rms_norm_eps=1e-6, max_position_embeddings=run.data.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    with torch.device("meta"):
        drafter = run.drafter.build(info, layer_ids, run.target.mask_token_id)
    return sum(p.numel() for p in drafter.parameters())


def _amount(run: RunConfig) -> tuple[int, int, tuple[str, ...]]:
    """Return samples, mean tokens of a sample, and what was assumed about them."""
    file, notes = Path(run.data.train), []
    samples = run.plan.samples
    if samples is None and file.is_file():
        with file.open("rb") as lines:
            samples = sum(1 for line in lines if line.strip())
        samples = min(samples, run.data.limit or samples)
    if samples is None:
        samples = 100_000
        notes.append(f"{samples:,} samples, since {run.data.train} is not here (plan.samples)")
    tokens = run.plan.tokens_per_sample
    if tokens is None:
        tokens = max(1, run.data.max_length // 2)
        notes.append(f"{tokens} tokens a sample, half of data.max_length (plan.tokens_per_sample)")
    notes.append(f"{run.plan.tflops:g} TFLOP/s a rank (plan.tflops)")
    return samples, min(tokens, run.data.max_length), tuple(notes)


def _memory(run: RunConfig, shape: TargetShape, drafter: int, taps: int, tokens: int) -> dict[str, float]:
    """Return bytes on one rank. ZeRO 1 shards masters and moments, 2 the gradients too, 3 the weights too."""
    ranks, stage = run.plan.ranks, run.engine.zero_stage if run.engine.kind == "deepspeed" else 0
    width = 4 if run.engine.precision == "fp32" else 2
    batch, length, d = run.engine.micro_batch_size, run.data.row_tokens or run.data.max_length, shape.hidden_size
    documents = 1.0 if run.data.row_tokens is None else max(1.0, run.data.row_tokens / tokens)  # of a row
    rows = batch * documents * _anchors(run, tokens) * run.drafter.gamma
    layers = getattr(run.drafter, "num_layers", 1)
    state = (0 if width == 4 else 4) + _moments_width(run)  # in fp32 the weights are the masters
    kept = "8-bit" if run.optim.name == "adamw8bit" else "Adam"
    return {
        "target, weights": shape.parameters * _target_width(run),
        "drafter, weights": drafter * width / (ranks if stage >= 3 else 1),
        "drafter, gradients": drafter * 4 / (ranks if stage >= 2 else 1),
        f"drafter, fp32 masters and {kept} moments": drafter * state / (ranks if stage >= 1 else 1),
        "features of a micro-batch": batch * length * d * (taps + 1) * width,
        "drafter, activations (estimate)": rows * d * width * ACTIVATIONS_PER_LAYER * layers,
        "loss, logits of a chunk (estimate)": min(rows, LOSS_ROWS) * _loss_elements(run, shape) * 4,
    }


def _anchors(run: RunConfig, tokens: int) -> int:
    """Return the anchors of a sample of ``tokens`` tokens, were all of them supervised."""
    share = 1.0 if run.data.anchor_share is None else run.data.anchor_share
    return min(run.data.anchors_per_sample, math.ceil(share * tokens))


def _moments_width(run: RunConfig) -> int:
    """Return bytes of both moments of a parameter, without the 8-bit ones' scales (8 bytes for 256 parameters)."""
    return 2 if run.optim.name == "adamw8bit" else 8


def _target_width(run: RunConfig) -> int:
    """Return bytes of a frozen weight; auto is fp32 on a CPU and 16 bits on CUDA."""
    if run.target.dtype != "auto":
        return 4 if run.target.dtype == "fp32" else 2
    if run.engine.device != "auto":
        return 4 if run.engine.device == "cpu" else 2
    import torch

    return 2 if torch.cuda.is_available() or run.engine.kind == "deepspeed" else 4


def _disk(run: RunConfig, shape: TargetShape, drafter: int, tokens: int) -> dict[str, float]:
    checkpoint = drafter * (4 + _moments_width(run))
    return {
        "target, 16-bit weights": shape.parameters * 2,
        "tokenised samples": tokens * 5,
        f"checkpoints ({run.train.keep} kept, and one being written)": checkpoint * (run.train.keep + 1),
        "package": drafter * PACKAGE_WIDTH.get(run.export.profile, 2.0),
    }


def _work(run: RunConfig, shape: TargetShape, drafter: int, tokens: int) -> dict[str, float]:
    """Return the FLOP of one sample: 2 a weight forward, 4 backward; the frozen head has no weight gradient."""
    rows = _anchors(run, tokens) * run.drafter.gamma
    logits = (shape.vocab_size + 2 * _draft_vocab(run, shape)) * shape.hidden_size
    return {
        "target": 2.0 * shape.active_parameters * tokens,
        "drafter": 6.0 * drafter * rows,
        "loss": 2.0 * logits * rows,  # target and drafted logits forward, one product backward
    }


def _draft_vocab(run: RunConfig, shape: TargetShape) -> int:
    """Return Vd, the tokens that the drafter can propose."""
    return getattr(run.drafter, "draft_vocab_size", None) or shape.vocab_size


def _loss_elements(run: RunConfig, shape: TargetShape) -> int:
    """Return the elements of the loss's buffers for one row: three of Vd, and two of V if that is more."""
    drafted = _draft_vocab(run, shape)
    return 3 * drafted + (2 * shape.vocab_size if drafted < shape.vocab_size else 0)
