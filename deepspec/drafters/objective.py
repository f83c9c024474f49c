"""What the training objectives of all drafters share: the supervised slots, their loss and their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepspec.contracts import Ratio
from deepspec.losses.fused import BlockLoss, block_loss
from deepspec.losses.task import Pace, RowTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Conventions, Features
    from deepspec.drafters.base import Drafter
    from deepspec.losses.task import LossMode


@dataclass(frozen=True)
class Rows:
    """The supervised slots of a batch, one row each."""

    mask: Tensor  # [B, A, K] the slots that count
    index: Tensor  # [R] place of the slot's state in the flattened [B, A, block_size]
    slot: Tensor  # [R] j
    block: Tensor  # [R] place of its block in the flattened [B, A]
    position: Tensor  # [R] index of the judging target state in the flattened [B, T]: that of the token before
    previous: Tensor  # [R] token before the drafted one
    label: Tensor  # [R] the drafted token
    weight: Tensor  # [R] weight of the slot


class Terms(NamedTuple):
    """How much each part of the draft's loss counts."""

    ce: float = 0.0  # cross-entropy of the text
    soft: float = 0.0  # cross-entropy against the target's distribution
    l1: float = 0.0  # ||q - p||_1
    lk: float = 0.0  # -log of the acceptance
    mix: float = 0.0  # KL divergence far from the target, total variation close to it
    eta: float = 1.0  # how fast that turns
    reverse: float = 0.0  # KL(q || p)
    jsd: float = 0.0  # Jensen-Shannon divergence
    pace: float | None = None  # smoothing of D-PACE's weights, which take the place of the slots' own; None: not


class LogitBias(NamedTuple):
    """What a drafter adds to its logits: ``features matrix^T``."""

    features: Tensor  # [R, r]
    matrix: Tensor  # [Vd, r]


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


def slot_indices(batch: Batch, gamma: int) -> Tensor:
    """Return [B, A, K], the index into T of the token before each slot; slots beyond the row get its last one."""
    before = batch.anchor_indices[..., None] + torch.arange(gamma, device=batch.input_ids.device)
    return before.clamp(max=batch.input_ids.shape[1] - 1)


def total_weight(batch: Batch, weights: Sequence[float]) -> Tensor:
    """Return the sum (0-d fp32) of the slots' ``weights`` (K), which every term is divided by."""
    mask = slot_mask(batch, len(weights))
    return (mask * torch.tensor(weights, device=mask.device)).sum()


def supervised_blocks(batch: Batch, gamma: int) -> Tensor:
    """Return how many blocks (0-d fp32) have a slot that counts, which a loss with D-PACE's weights is divided by.

    Its weights depend on the draft, so that their sum is not known from the batch; they stay in the numerator.
    """
    return slot_mask(batch, gamma)[..., 0].sum().float()


def supervised_rows(batch: Batch, conventions: Conventions, weights: Sequence[float]) -> Rows:
    """Pick the slots that count, by ``weights`` (K); the others cost nothing.

    On CUDA the host waits here for the number of rows; ``block_loss`` waits again to cut them into chunks.
    """
    width, gamma = batch.input_ids.shape[1], conventions.gamma
    mask = slot_mask(batch, gamma)
    place = mask.flatten().nonzero().squeeze(1)  # [R]
    block, slot = place // gamma, place % gamma
    position = (block // mask.shape[1]) * width + batch.anchor_indices.flatten()[block] + slot
    tokens = batch.input_ids.flatten()
    return Rows(
        mask=mask,
        index=block * conventions.block_size + conventions.silent_rows + slot,
        slot=slot,
        block=block,
        position=position,
        previous=tokens[position],
        label=tokens[position + 1],
        weight=torch.tensor(weights, device=mask.device)[slot],
    )


def draft_loss(
    drafter: Drafter, terms: Terms, rows: Rows, states: Tensor, features: Features, bias: LogitBias | None = None
) -> BlockLoss:
    """Score final-normed ``states`` [R, D]."""
    task = RowTask(
        target_hidden=features.last_hidden.flatten(0, 1),
        target_index=rows.position,
        labels=rows.label,
        weights=rows.weight if terms.pace is None else torch.ones_like(rows.weight),
        head=drafter.head,
        vocabulary=drafter.vocabulary,
        ce=terms.ce,
        soft=terms.soft,
        lk=terms.lk,
        mix=terms.mix,
        eta=terms.eta,
        l1=terms.l1,
        reverse=terms.reverse,
        jsd=terms.jsd,
        pace=None if terms.pace is None else Pace(terms.pace, rows.block, rows.slot, rows.mask.shape[2]),
        mode=loss_mode(drafter, states),
        **_known_sums(drafter, features),
    )
    return block_loss(states, task) if bias is None else block_loss(states, task, *bias)


def _known_sums(drafter: Drafter, features: Features) -> dict[str, Any]:
    """Return what the target's whole vocabulary says, where it is known and a reduced draft vocabulary can use it.

    Those are sums of exact logits; rounded ones have others.
    """
    exact = drafter.loss_precision != "bf16_logits"
    if drafter.vocabulary is None or features.log_sum is None or features.top is None or not exact:
        return {}
    return {"target_log_sum": features.log_sum.flatten(), "target_top": features.top.flatten()}


def loss_mode(drafter: Drafter, states: Tensor) -> LossMode:
    """Return the mode asked for; ``auto`` is exact on CUDA and for fp32, and cancels rounding errors otherwise."""
    if drafter.loss_precision != "auto":
        return drafter.loss_precision
    wide = states.dtype in (torch.float32, torch.float64) and drafter.head.weight.dtype == states.dtype
    return "exact" if states.is_cuda or wide else "common_mode"


def draft_metrics(rows: Rows, loss: BlockLoss, terms: Terms) -> dict[str, Ratio]:
    """Return detached metrics: losses, and acceptance and agreement by position, each slot counting once.

    The losses weigh slots as the batch says, under D-PACE too, so that runs can be compared; those that cost a pass of
    their own are there where ``terms`` asks for them.
    """
    asked = {"soft_ce": (terms.soft, loss.soft), "reverse_kl": (terms.reverse, loss.reverse)}
    asked["jsd"] = (terms.jsd, loss.jsd)
    weight, mask = rows.weight.sum(), rows.mask
    counts = mask.sum(dim=(0, 1)).float()  # [K]
    acceptance = loss.acceptance.float()
    zeros = torch.zeros_like(counts)
    place = rows.block * mask.shape[2] + rows.slot
    table = torch.zeros(mask.numel(), device=mask.device).index_copy(0, place, acceptance)
    expected = 1.0 + table.view(-1, mask.shape[2]).cumprod(-1).sum(-1)  # [B*A]
    full = mask[..., -1].flatten().float()
    return {
        "ce": Ratio((rows.weight * loss.ce).sum(), weight),
        "l1": Ratio((rows.weight * loss.l1).sum(), weight),
        "acceptance": Ratio(zeros.index_add(0, rows.slot, acceptance), counts),
        "top1": Ratio(zeros.index_add(0, rows.slot, loss.agreement.float()), counts),
        "expected_length": Ratio((expected * full).sum(), full.sum()),
        **{name: Ratio((rows.weight * value).sum(), weight) for name, (share, value) in asked.items() if share},
    }
