"""Decoding with DSpark: context keys and values once, one pass over the block, then the Markov head token by token.

A block is trained with K slots that see each other in both directions. The pass therefore always feeds all K slots,
also when fewer tokens are asked for; only the head is limited to the slots that are asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from deepspec.contracts import Proposal
from deepspec.errors import ConfigError, DeepSpecError

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import TokenSampler
    from deepspec.drafters.dspark.model import DSparkDrafter
    from deepspec.nn.block import DrafterLayer


@dataclass
class DecodingState:
    """What the drafter remembers of one sequence. The K places behind the context are scratch for the block."""

    keys: list[Tensor]  # per layer [1, Hkv, max_length + K, Dh]
    values: list[Tensor]
    cos: Tensor  # [max_length + K, Dr]
    sin: Tensor
    window_mask: Tensor | None  # [1, 1, K, w-1+K] for a sliding window
    scratch: int  # K
    length: int = 0  # committed positions

    @property
    def max_length(self) -> int:
        """Most positions the state can hold."""
        return self.cos.shape[0] - self.scratch


@torch.no_grad()
def start(drafter: DSparkDrafter, max_length: int) -> DecodingState:
    """Return an empty state for one sequence of at most ``max_length`` positions."""
    gamma, weight = drafter.conventions.gamma, drafter.fc.weight
    shape = (1, drafter.target.num_key_value_heads, max_length + gamma, drafter.target.head_dim)
    cos, sin = drafter.rope(torch.arange(max_length + gamma, device=weight.device), weight.dtype)
    caches = [[torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in drafter.layers] for _ in range(2)]
    mask = _window_mask(drafter.conventions.sliding_window, gamma, weight.device)
    return DecodingState(keys=caches[0], values=caches[1], cos=cos, sin=sin, window_mask=mask, scratch=gamma)


@torch.no_grad()
def extend(drafter: DSparkDrafter, state: DecodingState, hidden: Tensor) -> None:
    """Append the target's features [t, C*D] of the next t committed positions."""
    first, last = state.length, state.length + hidden.shape[0]
    if last > state.max_length:
        raise ConfigError(
            f"{last} positions do not fit a decoding state made for {state.max_length}: start a longer one"
        )
    context = drafter.context(hidden)[None]  # [1, t, D]
    rotation = (state.cos[first:last], state.sin[first:last])
    for index, layer in enumerate(drafter.decoder_layers):
        keys, values = layer.self_attn.keys_values(context, rotation)
        state.keys[index][:, :, first:last] = keys
        state.values[index][:, :, first:last] = values
    state.length = last


@torch.no_grad()
def propose(
    drafter: DSparkDrafter, state: DecodingState, anchor: int, num_tokens: int, sampler: TokenSampler
) -> Proposal:
    """Draft ``num_tokens`` tokens after ``anchor``, which sits right behind the state's positions."""
    if not 1 <= num_tokens <= drafter.conventions.gamma:
        raise ConfigError(
            f"{num_tokens} tokens asked of a drafter for 1 .. {drafter.conventions.gamma}: change evaluate.gamma"
        )
    hidden = _block_states(drafter, state, anchor)[:num_tokens]  # [k, D]
    return _sample(drafter, hidden, anchor, sampler)


def _block_states(drafter: DSparkDrafter, state: DecodingState, anchor: int) -> Tensor:
    """Return the final-normed states [K, D] of the block at ``anchor``."""
    gamma, first = drafter.conventions.gamma, state.length
    x = drafter.block_inputs(torch.tensor([anchor], device=state.cos.device))  # [1, K, D]
    rotation = (state.cos[first : first + gamma], state.sin[first : first + gamma])
    for index, layer in enumerate(drafter.decoder_layers):
        x = _layer(layer, x, state, index, rotation, drafter)
    return drafter.norm(x)[0]


def _layer(
    layer: DrafterLayer,
    x: Tensor,
    state: DecodingState,
    index: int,
    rotation: tuple[Tensor, Tensor],
    drafter: DSparkDrafter,
) -> Tensor:
    attention, end = layer.self_attn, state.length + x.shape[1]
    normed = layer.input_layernorm(x)
    keys, values = attention.keys_values(normed, rotation)
    state.keys[index][:, :, state.length : end] = keys
    state.values[index][:, :, state.length : end] = values
    begin, mask = _visible(state)
    seen = slice(begin, end)
    x = x + attention.output(
        attention.queries(normed, rotation),
        state.keys[index][:, :, seen],
        state.values[index][:, :, seen],
        mask,
        drafter.attention_backend,
    )
    return x + layer.mlp(layer.post_attention_layernorm(x))


def _visible(state: DecodingState) -> tuple[int, Tensor | None]:
    """Return the first context position that any slot sees, and the mask over it, the rest and the block."""
    if state.window_mask is None:
        return 0, None
    reach = min(state.length, state.window_mask.shape[-1] - state.scratch)
    return state.length - reach, state.window_mask[..., -(reach + state.scratch) :]


def _window_mask(window: int | None, gamma: int, device: torch.device) -> Tensor | None:
    """Return [1, 1, K, w-1+K]: of the w-1 positions before the anchor slot j no longer sees the first j."""
    if window is None:
        return None
    column = torch.arange(window - 1 + gamma, device=device)
    slot = torch.arange(gamma, device=device)[:, None]
    return ((column >= slot) | (column >= window - 1))[None, None]


def _sample(drafter: DSparkDrafter, hidden: Tensor, anchor: int, sampler: TokenSampler) -> Proposal:
    """Draw the tokens of ``hidden`` [k, D] one after the other; the head's product is shared by all slots."""
    vocabulary, markov = drafter.vocabulary, drafter.markov_head
    base = drafter.draft_head.logits(hidden).float()  # [k, V], or [k, Vd] of a reduced vocabulary
    draw = sampler if vocabulary is None else partial(sampler, ids=vocabulary.ids)
    previous = torch.tensor(anchor, device=hidden.device)
    tokens, probabilities, seen = [], [], []
    for logits in base:
        if markov is not None:
            row = markov.markov_w1.weight[previous]  # [r]
            seen.append(row)
            logits = logits + torch.mv(markov.markov_w2.weight, row)
        _check(logits)
        previous, distribution = draw(logits)
        tokens.append(previous)
        probabilities.append(distribution)
    confidence = _confidence(drafter, hidden, seen)
    q = torch.stack(probabilities)
    return Proposal(torch.stack(tokens), q if vocabulary is None else vocabulary.spread(q), confidence)


def _confidence(drafter: DSparkDrafter, hidden: Tensor, seen: list[Tensor]) -> Tensor | None:
    if drafter.confidence_head is None:
        return None
    markov = torch.stack(seen) if drafter.config.confidence_sees_markov else None
    return drafter.confidence_head(hidden, markov).float().sigmoid()


def _check(logits: Tensor) -> None:
    """Refuse logits that are not finite: sampling from them gives token ids that do not exist."""
    if not math.isfinite(float(logits.sum())):
        raise DeepSpecError(
            "the drafter's logits are not finite (a state overflowed, or the weights are damaged): "
            "load target and drafter in bf16 or fp32, and check the package"
        )
