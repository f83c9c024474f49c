"""A target and drafters small enough to know every probability: Markov chains over a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deepspec.contracts import Committed, Proposal, TokenSampler


@dataclass
class ToyStep:
    logits: Tensor
    hidden: Tensor
    last_hidden: Tensor


class ToyTarget:
    """The next token depends on the last one: ``logits`` [V, V]. Hidden states are the positions."""

    device = torch.device("cpu")

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.steps: list[int] = []

    def new_cache(self, max_length: int) -> list[int]:
        self.max_length = max_length
        return []

    def step(
        self,
        input_ids: Tensor,
        cache: list[int],
        layer_ids: tuple[int, ...],  # noqa: ARG002
        *,
        num_logits: int | None = None,
    ) -> ToyStep:
        start = len(cache)
        cache.extend(input_ids[0].tolist())
        self.steps.append(input_ids.shape[1])
        positions = torch.arange(start, len(cache), dtype=torch.float32)
        wanted = input_ids[0][-(num_logits or input_ids.shape[1]) :]
        return ToyStep(self.logits[wanted], positions.unsqueeze(-1), positions.unsqueeze(-1))

    def crop(self, cache: list[int], length: int) -> None:
        del cache[length:]


class ToyDrafter:
    """A Markov chain that drafts; its confidence in a slot depends on the token before it, as DSpark's does."""

    def __init__(self, logits: Tensor, gamma: int = 5, confidence: Tensor | None = None) -> None:
        self.logits = logits
        self.conventions = SimpleNamespace(gamma=gamma, target_layer_ids=(0,))
        self.taps = (0,)
        self.confidence_temperatures = None
        self.confidence = confidence  # [V], by the token before the slot
        self.positions: list[float] = []

    def start(self, max_length: int) -> Any:  # noqa: ARG002
        self.positions = []
        return self.positions

    def extend(self, state: Any, committed: Committed) -> None:
        state.extend(committed.hidden[:, 0].tolist())

    def propose(
        self,
        state: Any,  # noqa: ARG002
        anchor: int,
        num_tokens: int,
        sampler: TokenSampler,
    ) -> Proposal:
        tokens, probabilities, confidence, last = [], [], [], anchor
        for _ in range(num_tokens):
            token, q = sampler(self.logits[last])
            confidence.append(1.0 if self.confidence is None else float(self.confidence[last]))
            last = int(token)
            tokens.append(last)
            probabilities.append(q)
        sure = None if self.confidence is None else torch.tensor(confidence).logit()
        return Proposal(torch.tensor(tokens), torch.stack(probabilities), sure)


class ScriptDrafter(ToyDrafter):
    """Drafts what it is told: ``script[position]`` is the token it believes stands at that position."""

    def __init__(self, script: dict[int, int], vocab: int, gamma: int = 5) -> None:
        super().__init__(torch.zeros(vocab, vocab), gamma)
        self.script = script

    def propose(self, state: Any, anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:  # noqa: ARG002
        first = len(state) + 1
        tokens = torch.tensor([self.script.get(first + j, 0) for j in range(num_tokens)])
        return Proposal(tokens, torch.nn.functional.one_hot(tokens, self.logits.shape[0]).float())


def counting_target(vocab: int) -> ToyTarget:
    """A target that counts: token t is followed by t + 1 (modulo the vocabulary)."""
    return ToyTarget(10.0 * torch.eye(vocab).roll(1, dims=1))
