"""The training objective of DSpark: cross-entropy, L1 distance and confidence over the supervised slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.contracts import LossOutput, Ratio
from deepspec.losses.fused import BlockLoss, RowTask, block_loss
from deepspec.losses.rows import binary_cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch, Features
    from deepspec.drafters.dspark.config import DSparkConfig
    from deepspec.drafters.dspark.model import DSparkDrafter
    from deepspec.losses.fused import LossMode


@dataclass(frozen=True)
class Rows:
    """The supervised slots of a batch, one row each."""

    index: Tensor  # [R] slot number in the flattened [B, A, K]
    slot: Tensor  # [R] j
    position: Tensor  # [R] index of the judging target state in the flattened [B, T]: that of the token before
    previous: Tensor  # [R] token before the drafted one
    label: Tensor  # [R] the drafted token
    weight: Tensor  # [R] exp(-j / decay)


def coefficients(config: DSparkConfig) -> dict[str, float]:
    """Return the weight of each sum. ``draft`` holds CE and L1 with their weights inside: they share a denominator."""
    return {"draft": 1.0, "confidence": config.confidence} if config.confidence_head else {"draft": 1.0}


def slot_mask(batch: Batch, gamma: int) -> Tensor:
    """Return [B, A, K], True where slot j counts: all tokens up to a+1+j are supervised, in the anchor's document."""
    width = batch.input_ids.shape[1]
    target = batch.anchor_indices[..., None] + 1 + torch.arange(gamma, device=batch.input_ids.device)  # [B, A, K]
    inside = target < width
    flat = target.clamp(max=width - 1).flatten(1)
    supervised = batch.loss_mask.gather(1, flat).view_as(target)
    segment = batch.segment_ids.gather(1, flat).view_as(target)
    same = segment == batch.segment_ids.gather(1, batch.anchor_indices)[..., None]
    counts = inside & supervised & same & batch.anchor_mask[..., None]
    return counts.long().cumprod(-1).bool()


def denominators(config: DSparkConfig, batch: Batch) -> dict[str, Tensor]:
    """Return the sum of slot weights (0-d fp32), which every term is divided by."""
    mask = slot_mask(batch, config.gamma)
    total = (mask * _slot_weights(config, mask.device)).sum()
    return dict.fromkeys(coefficients(config), total)


def score(drafter: DSparkDrafter, batch: Batch, features: Features, hidden: Tensor) -> LossOutput:
    """Score final-normed block states ``hidden`` [B, A, K, D] of a micro-batch."""
    mask = slot_mask(batch, drafter.config.gamma)
    rows = _rows(drafter.config, batch, mask)
    states = hidden.flatten(0, 2)[rows.index]  # [R, D]
    markov = None if drafter.markov_head is None else drafter.markov_head.markov_w1(rows.previous)  # [R, r]
    loss = _draft_loss(drafter, rows, states, markov, features.last_hidden.flatten(0, 1))
    sums = {"draft": loss.total}
    metrics = _draft_metrics(rows, loss, mask)
    if drafter.confidence_head is not None:
        seen = markov if drafter.config.confidence_sees_markov else None
        logits = drafter.confidence_head(states, seen).float()  # [R]
        term = (rows.weight * binary_cross_entropy(logits, loss.acceptance)).sum()
        sums["confidence"] = term
        error = (logits.detach().sigmoid() - loss.acceptance).abs()
        metrics["confidence"] = Ratio(term.detach(), rows.weight.sum())
        metrics["confidence_error"] = Ratio(error.sum(), _count(error))
    return LossOutput(sums=sums, metrics=metrics)


def supervised_rows(config: DSparkConfig, batch: Batch) -> Rows:
    """Return the slots of ``batch`` that count."""
    return _rows(config, batch, slot_mask(batch, config.gamma))


def _rows(config: DSparkConfig, batch: Batch, mask: Tensor) -> Rows:
    """Pick the slots that count; the others cost nothing.

    On CUDA the host waits here for the number of rows; ``block_loss`` waits again to cut them into chunks.
    """
    width, gamma = batch.input_ids.shape[1], mask.shape[2]
    index = mask.flatten().nonzero().squeeze(1)  # [R]
    slot = index % gamma
    row, block = index // (mask.shape[1] * gamma), index // gamma
    position = row * width + batch.anchor_indices.flatten()[block] + slot
    tokens = batch.input_ids.flatten()
    weight = _slot_weights(config, mask.device)[slot]
    return Rows(index, slot, position, tokens[position], tokens[position + 1], weight)


def _draft_loss(
    drafter: DSparkDrafter, rows: Rows, states: Tensor, markov: Tensor | None, target_hidden: Tensor
) -> BlockLoss:
    task = RowTask(
        target_hidden=target_hidden,
        target_index=rows.position,
        labels=rows.label,
        weights=rows.weight,
        head=drafter.head,
        vocabulary=drafter.vocabulary,
        ce=drafter.config.ce,
        l1=drafter.config.l1,
        mode=loss_mode(drafter, states),
    )
    if drafter.markov_head is None:
        return block_loss(states, task)
    return drafter.markov_head.markov_w2(lambda w2: block_loss(states, task, markov, w2))


def loss_mode(drafter: DSparkDrafter, states: Tensor) -> LossMode:
    """Return the mode asked for; ``auto`` is exact on CUDA and for fp32, and cancels rounding errors otherwise."""
    if drafter.loss_precision != "auto":
        return drafter.loss_precision
    wide = states.dtype in (torch.float32, torch.float64) and drafter.head.weight.dtype == states.dtype
    return "exact" if states.is_cuda or wide else "common_mode"


def _draft_metrics(rows: Rows, loss: BlockLoss, mask: Tensor) -> dict[str, Ratio]:
    """Return detached metrics: weighted losses, and acceptance and agreement by position, each slot counting once."""
    weight = rows.weight.sum()
    counts = mask.sum(dim=(0, 1)).float()  # [K]
    acceptance = loss.acceptance.float()
    zeros = torch.zeros_like(counts)
    table = torch.zeros(mask.numel(), device=mask.device).index_copy(0, rows.index, acceptance)
    expected = 1.0 + table.view(-1, mask.shape[2]).cumprod(-1).sum(-1)  # [B*A]
    full = mask[..., -1].flatten().float()
    return {
        "ce": Ratio((rows.weight * loss.ce).sum(), weight),
        "l1": Ratio((rows.weight * loss.l1).sum(), weight),
        "acceptance": Ratio(zeros.index_add(0, rows.slot, acceptance), counts),
        "top1": Ratio(zeros.index_add(0, rows.slot, loss.agreement.float()), counts),
        "expected_length": Ratio((expected * full).sum(), full.sum()),
    }


def _slot_weights(config: DSparkConfig, device: torch.device) -> Tensor:
    """Return exp(-j / decay) [K]."""
    return torch.exp(-torch.arange(config.gamma, device=device, dtype=torch.float32) / config.decay)


def _count(values: Tensor) -> Tensor:
    return torch.full((), values.numel(), dtype=torch.float32, device=values.device)
