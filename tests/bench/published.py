"""A training step of DSpark as the published code runs it, written out plainly.

What is kept of its shape, since time and memory follow from it:

- the drafter's weights are in bf16 (or all in fp32, to compare shapes alone), masters and Adam's moments in fp32;
- the target's features are read for the padded batch, and blocks attend over context and blocks with keys repeated for
  each head (on a GPU by FlexAttention, as ours);
- head and Markov matrix give logits [B, A, K, V] for every slot of every anchor, padding and unsupervised ones too;
- the target's state is gathered for each slot, so a position in several blocks goes through the head several times;
- two pairs of softmax over V stay in autograd's graph at once, one for the acceptance, whose value alone is used, and
  one for L1; cross-entropy keeps its own.

Weights, batch and anchors are ours, so in fp32 the loss is ours too; ``tests/bench/test_quick.py`` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from deepspec.drafters import objective
from deepspec.engine.meters import Stopwatch
from deepspec.nn.attention import Visible, attend
from deepspec.nn.masks import block_positions, block_visibility
from deepspec.nn.rope import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch, Features
    from deepspec.drafters.dspark.model import DSparkDrafter
    from deepspec.features.online import FeatureSource
    from deepspec.nn.block import ContextAttention, DrafterLayer, Rotation

LEARNING_RATE, BETAS, CLIP_NORM = 3e-4, (0.9, 0.95), 1.0


def slot_losses(draft: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return cross-entropy, L1 and detached acceptance [R] of logits [R, V], whatever their precision is."""
    accepted = 1.0 - 0.5 * (draft.float().softmax(-1) - target.float().softmax(-1)).abs().sum(-1)
    ce = functional.cross_entropy(draft, labels, reduction="none")
    l1 = (draft.float().softmax(-1) - target.float().softmax(-1)).abs().sum(-1)
    return ce, l1, accepted.detach()  # the acceptance's graph lives until here


class PublishedStep:
    """Optimiser steps of a drafter, which is changed; it has a Markov head without a state and the whole vocabulary."""

    def __init__(self, drafter: DSparkDrafter, features: FeatureSource) -> None:
        self._drafter, self._features = drafter, features
        self._weights = list(drafter.parameters())
        self._low = self._weights[0].dtype != torch.float32
        self._masters = [p.detach().float().requires_grad_() for p in self._weights] if self._low else self._weights
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
        self.stopwatch = Stopwatch(self._weights[0].device)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """Run one step over its micro-batches; return the loss before it (0-d)."""
        losses = []
        for batch in batches:
            with self.stopwatch.part("target"):
                features = self._features(batch)
            with self.stopwatch.part("draft"):
                loss = self.loss(batch, features) / len(batches)
                loss.backward()
            losses.append(loss.detach())
        with self.stopwatch.part("optimiser"):
            self._update()
        return torch.stack(losses).sum()

    def loss(self, batch: Batch, features: Features) -> Tensor:
        """Return the loss of a micro-batch (0-d), each term divided by the weight of its slots."""
        drafter, config = self._drafter, self._drafter.config
        states = self._states(batch, features.hidden)  # [B, A, K, D]
        index = objective.slot_indices(batch, config.gamma)  # [B, A, K]
        tokens, width = batch.input_ids[:, None].expand(-1, index.shape[1], -1), batch.input_ids.shape[1]
        labels = tokens.gather(2, (index + 1).clamp(max=width - 1))  # [B, A, K]
        judges = features.last_hidden.gather(1, index.flatten(1)[..., None].expand(-1, -1, states.shape[-1]))
        target = drafter.head.logits(judges.view_as(states))  # [B, A, K, V]
        draft = drafter.head.logits(states)
        before = None
        if drafter.markov_head is not None:
            before = drafter.markov_head.markov_w1(tokens.gather(2, index))  # [B, A, K, r]
            draft = draft + functional.linear(before, drafter.markov_head.markov_w2.weight)
        ce, l1, accepted = slot_losses(draft.flatten(0, 2), target.flatten(0, 2), labels.flatten())
        terms = config.ce * ce + config.l1 * l1
        if drafter.confidence_head is not None:
            seen = before if config.confidence_sees_markov else None
            odds = drafter.confidence_head(states, seen).float().flatten()
            terms = terms + config.confidence * functional.binary_cross_entropy_with_logits(
                odds, accepted.clamp(0.0, 1.0), reduction="none"
            )
        decay = torch.tensor(config.slot_weights, device=states.device)
        weights = (objective.slot_mask(batch, config.gamma) * decay).flatten()
        return (weights * terms).sum() / weights.sum()

    def _states(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Run the blocks of all anchors over the features; return final-normed states [B, A, K, D]."""
        drafter = self._drafter
        size, rope = drafter.conventions.block_size, drafter.rope
        x = drafter.row_inputs(batch)  # [B, A*K, D]
        context = drafter.context(hidden)  # [B, T, D]
        places = block_positions(batch, size).flatten(1)
        rotation = rope(torch.cat((batch.position_ids, places), dim=1)[:, None], x.dtype)
        mask = block_visibility(batch, size).for_kernel("auto")
        for layer in drafter.decoder_layers:
            x = _layer(layer, x, context, rotation, mask)
        return drafter.norm(x).unflatten(1, (-1, size))

    @torch.no_grad()
    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._weights, CLIP_NORM)
        if self._low:
            for weight, master in zip(self._weights, self._masters, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._low:
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
                weight.grad = None


def _layer(layer: DrafterLayer, x: Tensor, context: Tensor, rotation: Rotation, mask: Visible) -> Tensor:
    x = x + _attention(layer.self_attn, layer.input_layernorm(x), context, rotation, mask)
    mixed: Tensor = layer.mlp(layer.post_attention_layernorm(x))
    return x + mixed


def _attention(part: ContextAttention, x: Tensor, context: Tensor, rotation: Rotation, mask: Visible) -> Tensor:
    """Context and block are projected one after the other; each group's keys are repeated for its heads."""
    rows, slots, length = x.shape[0], x.shape[1], context.shape[1] + x.shape[1]
    queries = part.q_norm(part.q_proj(x).view(rows, slots, -1, part.head_dim)).transpose(1, 2)
    keys = torch.cat((part.k_proj(context), part.k_proj(x)), dim=1).view(rows, length, -1, part.head_dim)
    values = torch.cat((part.v_proj(context), part.v_proj(x)), dim=1).view(rows, length, -1, part.head_dim)
    cos, sin = rotation
    queries = rotate(queries, cos[..., -slots:, :], sin[..., -slots:, :])
    keys = rotate(part.k_norm(keys).transpose(1, 2), cos, sin)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.transpose(1, 2).repeat_interleave(groups, 1)
    mixed = attend(queries, keys, values, mask, backend="auto")  # [B, H, A*K, Dh]
    out: Tensor = part.o_proj(mixed.transpose(1, 2).flatten(2))
    return out
