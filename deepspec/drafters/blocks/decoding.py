"""Decoding with a block drafter: context keys and values once, one pass over the block, then token by token.

A block is trained with rows that see each other in both directions. The pass therefore always feeds all of them, also
when fewer tokens are asked for; only the head is limited to the slots that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from deepspec.contracts import Proposal
from deepspec.drafters.base import require_finite
from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import TokenSampler
    from deepspec.drafters.blocks.model import BlockDrafter
    from deepspec.nn.block import DrafterLayer


class TokenBias(Protocol):
    """Lets the tokens of a block depend on each other; asked for one slot after the other."""

    def __call__(self, previous: Tensor) -> Tensor:
        """Return what the next slot adds to its logits [Vd], after the token ``previous`` (0-d)."""
        ...


@dataclass
class DecodingState:
    """What the drafter remembers of one sequence. The N places behind the context are scratch for a block's rows."""

    keys: list[Tensor]  # per layer [1, Hkv, max_length + N, Dh]
    values: list[Tensor]
    cos: Tensor  # [max_length + N, Dr]
    sin: Tensor
    window_mask: Tensor | None  # [1, 1, N, w-1+N] for a sliding window
    scratch: int  # N
    length: int = 0  # committed positions

    @property
    def max_length(self) -> int:
        """Most positions the state can hold."""
        return self.cos.shape[0] - self.scratch


@torch.no_grad()
def start(drafter: BlockDrafter, max_length: int) -> DecodingState:
    """Return an empty state for one sequence of at most ``max_length`` positions."""
    size, weight = drafter.conventions.block_size, drafter.fc.weight
    shape = (1, drafter.target.num_key_value_heads, max_length + size, drafter.target.head_dim)
    cos, sin = drafter.rope(torch.arange(max_length + size, device=weight.device), weight.dtype)
    caches = [[torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in drafter.layers] for _ in range(2)]
    mask = _window_mask(drafter.conventions.sliding_window, size, weight.device)
    return DecodingState(keys=caches[0], values=caches[1], cos=cos, sin=sin, window_mask=mask, scratch=size)


@torch.no_grad()
def extend(drafter: BlockDrafter, state: DecodingState, hidden: Tensor) -> None:
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
    drafter: BlockDrafter, state: DecodingState, anchor: int, num_tokens: int, sampler: TokenSampler
) -> Proposal:
    """Draft ``num_tokens`` tokens after ``anchor``, which sits right behind the state's positions."""
    if not 1 <= num_tokens <= drafter.conventions.gamma:
        raise ConfigError(
            f"{num_tokens} tokens asked of a drafter for 1 .. {drafter.conventions.gamma}: change evaluate.gamma"
        )
    first = drafter.conventions.silent_rows
    states = _block_states(drafter, state, anchor)[first : first + num_tokens]  # [k, D]
    return _sample(drafter, states, anchor, sampler)


def _block_states(drafter: BlockDrafter, state: DecodingState, anchor: int) -> Tensor:
    """Return the final-normed states [N, D] of the block at ``anchor``."""
    size, first = drafter.conventions.block_size, state.length
    x = drafter.block_inputs(torch.tensor([anchor], device=state.cos.device))  # [1, N, D]
    rotation = (state.cos[first : first + size], state.sin[first : first + size])
    for index, layer in enumerate(drafter.decoder_layers):
        x = _layer(layer, x, state, index, rotation, drafter)
    return drafter.norm(x)[0]


def _layer(
    layer: DrafterLayer,
    x: Tensor,
    state: DecodingState,
    index: int,
    rotation: tuple[Tensor, Tensor],
    drafter: BlockDrafter,
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


def _window_mask(window: int | None, size: int, device: torch.device) -> Tensor | None:
    """Return [1, 1, N, w-1+N]: of the w-1 positions before the anchor row j no longer sees the first j."""
    if window is None:
        return None
    column = torch.arange(window - 1 + size, device=device)
    row = torch.arange(size, device=device)[:, None]
    return ((column >= row) | (column >= window - 1))[None, None]


def _sample(drafter: BlockDrafter, states: Tensor, anchor: int, sampler: TokenSampler) -> Proposal:
    """Draw the tokens of ``states`` [k, D] one after the other; the head's product is shared by all slots."""
    vocabulary, bias = drafter.vocabulary, drafter.token_bias(states)
    base = drafter.draft_head.logits(states).float()  # [k, V], or [k, Vd] of a reduced vocabulary
    draw = sampler if vocabulary is None else partial(sampler, ids=vocabulary.ids)
    previous = torch.tensor(anchor, device=states.device)
    tokens, probabilities = [], []
    for logits in base:
        if bias is not None:
            logits = logits + bias(previous)
        require_finite(logits)
        previous, distribution = draw(logits)
        tokens.append(previous)
        probabilities.append(distribution)
    q = torch.stack(probabilities)
    odds = drafter.confidence_logits(states, bias)
    return Proposal(torch.stack(tokens), q if vocabulary is None else vocabulary.spread(q), odds)
