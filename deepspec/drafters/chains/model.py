"""What autoregressive drafters share: training along their own chains, and drafting token by token.

Row t stands for position t of the text: the drafter's state there, from the target's features of position t, joined
with the token at t+1. It predicts the token at t+2, so that the block of the anchor at a starts from row a-1. The next
slot's row takes the state that came out of the row before, and the next token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from deepspec.contracts import Conventions, LossOutput, Proposal
from deepspec.drafters import objective
from deepspec.drafters.base import Drafter, require_finite
from deepspec.errors import ConfigError
from deepspec.nn.attention import attend
from deepspec.nn.chain import (
    ChainLayer,
    ChainMemory,
    attend_chain,
    chains_visible,
    pick_rotation,
    pick_rows,
    text_visible,
)
from deepspec.nn.norm import RMSNorm
from deepspec.nn.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Committed, Features, TargetInfo, TokenSampler
    from deepspec.drafters.chains.options import ChainOptions

INITIAL_STD = 0.02
PREFILL_ROWS = 1024  # of a prompt at a time: their mask is as wide as the prompt is long


@dataclass
class ChainState:
    """What the drafter remembers of one sequence. The K places behind its rows are scratch for what it drafts."""

    keys: list[Tensor]  # per layer [1, Hkv, max_length + K, Dh]
    values: list[Tensor]
    cos: Tensor  # [max_length + K, Dr]
    sin: Tensor
    max_length: int
    length: int = 0  # rows whose next token is known
    pending: Tensor | None = None  # [1, D] the state of the last committed position, whose next token is not known yet


class ChainDrafter(Drafter):
    """Base of autoregressive drafters: layers over rows of a chain, then the target's head."""

    layers: nn.ModuleList

    def __init__(
        self, *, config: ChainOptions, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.conventions = Conventions(
            block_layout="autoregressive",
            gamma=config.gamma,
            target_layer_ids=tuple(target_layer_ids),
            mask_token_id=mask_token_id,
            sliding_window=config.sliding_window,
            is_causal=True,
        )
        self.coefficients = {"draft": 1.0}
        if config.draft_vocab_size is not None:
            self.reduce_vocabulary(config.draft_vocab_size, target.vocab_size)
        self.norm = RMSNorm(target.hidden_size, eps=target.rms_norm_eps)
        self.rope = RotaryEmbedding(
            target.rope_parameters, head_dim=target.head_dim, max_position=target.max_position_embeddings
        )

    @torch.no_grad()
    def reset(self) -> None:
        """Give every projection random weights, once a subclass has made its layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=INITIAL_STD)

    def first_states(self, hidden: Tensor, last_hidden: Tensor) -> Tensor:
        """Map the target's features [..., C*D] and last states [..., D] of positions to states [..., D]."""
        raise NotImplementedError

    def enter(self, states: Tensor, embeddings: Tensor) -> Tensor:  # noqa: ARG002 - for those that join them here
        """Join ``states`` [..., D] with ``embeddings`` [..., D] of the next tokens, in front of the first layer."""
        return states

    @property
    def chain_layers(self) -> list[ChainLayer]:
        """The layers, typed."""
        return cast("list[ChainLayer]", list(self.layers))

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weight (0-d fp32) of each loss term, from the batch alone."""
        return {"draft": objective.total_weight(_startable(batch), self.config.slot_weights)}

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the weighted sums of the loss terms and the detached metrics of a micro-batch."""
        batch = _startable(batch)
        rows = objective.supervised_rows(batch, self.conventions, self.config.slot_weights)
        states = self.block_states(batch, features).flatten(0, 2)[rows.index]  # [R, D]
        loss = objective.draft_loss(self, self.config.terms, rows, states, features)
        return LossOutput(sums={"draft": loss.total}, metrics=objective.draft_metrics(rows, loss, self.config.terms))

    def block_states(self, batch: Batch, features: Features) -> Tensor:
        """Run the chains of all anchors side by side; return final-normed states [B, A, K, D]."""
        gamma, window, width = self.conventions.gamma, self.conventions.sliding_window, batch.input_ids.shape[1]
        start = (batch.anchor_indices - 1).clamp(min=0)  # [B, A] the row of each block's first slot
        states, memories = self._text(batch, features, start)
        found = [states]
        for step in range(1, gamma):
            tokens = batch.input_ids.gather(1, (batch.anchor_indices + step).clamp(max=width - 1))
            embeddings = self._embed(tokens)
            position = batch.position_ids.gather(1, start) + step
            rotation = self.rope(position[:, None], states.dtype)
            seen = None if window is None else chains_visible(batch, window, step)
            states = self.enter(states, embeddings)
            for layer, memory in zip(self.chain_layers, memories, strict=True):
                memory.mask = memory.mask if seen is None else seen
                x = layer.normed(states, embeddings)
                memory.drafted.append(layer.self_attn.keys_values(x, rotation))
                heads = attend_chain(layer.self_attn.queries(x, rotation), memory, self.attention_backend)
                states = layer.finish(states, heads)
            found.append(states)
        return self.norm(torch.stack(found, dim=2))

    def _text(self, batch: Batch, features: Features, start: Tensor) -> tuple[Tensor, list[ChainMemory]]:
        """Run the rows of the text; return the states [B, A, D] of the rows ``start``, and every layer's memory.

        The last layer runs at those rows alone.
        """
        embeddings = self._embed(batch.input_ids.roll(-1, dims=1))  # a document's last row is seen by nobody
        states = self.enter(self.first_states(features.hidden, features.last_hidden), embeddings)
        rotation = self.rope(batch.position_ids[:, None], states.dtype)
        window, memories = self.conventions.sliding_window, []
        at_start = chains_visible(batch, window, 0)
        *front, last = self.chain_layers
        mask = text_visible(batch, window, self.attention_backend) if front else at_start
        for layer in front:
            x = layer.normed(states, embeddings)
            keys, values = layer.self_attn.keys_values(x, rotation)
            memories.append(ChainMemory(keys, values, at_start))
            heads = attend(layer.self_attn.queries(x, rotation), keys, values, mask, backend=self.attention_backend)
            states = layer.finish(states, heads)
        x = last.normed(states, embeddings)
        memories.append(ChainMemory(*last.self_attn.keys_values(x, rotation), at_start))
        queries = last.self_attn.queries(pick_rows(x, start), pick_rotation(rotation, start))
        heads = attend_chain(queries, memories[-1], self.attention_backend)
        return last.finish(pick_rows(states, start), heads), memories

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.head.embed(tokens).to(self.norm.weight.dtype)

    @torch.no_grad()
    def start(self, max_length: int) -> ChainState:
        """Return an empty decoding state for one sequence of at most ``max_length`` positions."""
        weight, places = self.norm.weight, max_length + self.conventions.gamma
        shape = (1, self.target.num_key_value_heads, places, self.target.head_dim)
        cos, sin = self.rope(torch.arange(places, device=weight.device), weight.dtype)
        caches = [[torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in self.layers] for _ in range(2)]
        return ChainState(caches[0], caches[1], cos, sin, max_length)

    @torch.no_grad()
    def extend(self, state: ChainState, committed: Committed) -> None:
        """Append the next t committed positions to the state."""
        held = 0 if state.pending is None else 1
        if state.length + held + len(committed.tokens) > state.max_length:
            raise ConfigError(
                f"{state.length + held + len(committed.tokens)} positions do not fit a decoding state made for "
                f"{state.max_length}: start a longer one"
            )
        if not committed.tokens:
            return
        states = self.first_states(committed.hidden, committed.last_hidden)  # [t, D]
        tokens = list(committed.tokens)
        if state.pending is None:
            tokens = tokens[1:]
        else:
            states = torch.cat((state.pending, states))
        state.pending = states[-1:]
        if tokens:
            for part in range(0, len(tokens), PREFILL_ROWS):
                rows = slice(part, part + PREFILL_ROWS)
                self._advance(state, states[:-1][None, rows], tokens[rows], state.length, only_remember=True)
                state.length += len(tokens[rows])

    @torch.no_grad()
    def propose(self, state: ChainState, anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:
        """Draft ``num_tokens <= gamma`` tokens after ``anchor``, which sits right behind the state's positions."""
        if not 1 <= num_tokens <= self.conventions.gamma:
            raise ConfigError(
                f"{num_tokens} tokens asked of a drafter for 1 .. {self.conventions.gamma}: change evaluate.gamma"
            )
        if state.pending is None:
            raise ConfigError("a decoding state without a position has nothing to draft from: extend it first")
        vocabulary, states, token = self.vocabulary, state.pending[None], anchor
        draw = sampler if vocabulary is None else partial(sampler, ids=vocabulary.ids)
        tokens, probabilities = [], []
        for step in range(num_tokens):
            states = self._advance(state, states, [token], state.length + step)  # [1, 1, D]
            logits = self.draft_head.logits(self.norm(states)[0, 0]).float()
            require_finite(logits)
            drawn, distribution = draw(logits)
            token = int(drawn)
            tokens.append(drawn)
            probabilities.append(distribution)
        q = torch.stack(probabilities)
        return Proposal(torch.stack(tokens), q if vocabulary is None else vocabulary.spread(q))

    def _advance(
        self, state: ChainState, states: Tensor, tokens: Sequence[int], first: int, *, only_remember: bool = False
    ) -> Tensor:
        """Run rows ``first`` and on, of ``states`` [1, n, D] and the n next tokens; return the states that come out.

        Rows that are ``only_remember``ed need no more of the last layer than its keys and values.
        """
        last = first + len(tokens)
        embeddings = self._embed(torch.tensor([tokens], device=states.device))
        rotation = (state.cos[first:last], state.sin[first:last])
        begin, mask = self._visible(first, last, states.device)
        states = self.enter(states, embeddings)
        for index, layer in enumerate(self.chain_layers):
            x = layer.normed(states, embeddings)
            keys, values = layer.self_attn.keys_values(x, rotation)
            state.keys[index][:, :, first:last] = keys
            state.values[index][:, :, first:last] = values
            if only_remember and index == len(self.layers) - 1:
                return states
            seen = slice(begin, last)
            queries = layer.self_attn.queries(x, rotation)
            heads = attend(
                queries, state.keys[index][:, :, seen], state.values[index][:, :, seen], mask,
                backend=self.attention_backend,
            )  # fmt: skip
            states = layer.finish(states, heads)
        return states

    def _visible(self, first: int, last: int, device: torch.device) -> tuple[int, Tensor | None]:
        """Return the first row that any of rows ``first:last`` sees, and the mask [1, 1, n, rows] from there on."""
        window = self.conventions.sliding_window
        begin = 0 if window is None else max(0, first - window + 1)
        if last == first + 1:
            return begin, None
        column = torch.arange(begin, last, device=device)
        row = torch.arange(first, last, device=device)[:, None]
        seen = column <= row
        return begin, (seen if window is None else seen & (column > row - window))[None, None]


def _startable(batch: Batch) -> Batch:
    """Leave out the anchors that stand first in their document: no row comes before them."""
    at = batch.position_ids.gather(1, batch.anchor_indices)
    return replace(batch, anchor_mask=batch.anchor_mask & (at > 0))
