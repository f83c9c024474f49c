"""The two small heads of DSpark: the low-rank Markov bias and the confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

T = TypeVar("T")


class LentWeight(nn.Module):
    """A matrix that is lent to a function.

    Sharded training gathers a parameter only while the forward of its own module runs; what needs the matrix itself,
    like the fused loss, therefore runs in here.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, use: Callable[[Tensor], T]) -> T:
        """Return ``use(weight)``."""
        return use(self.weight)


class MarkovHead(nn.Module):
    """Adds ``W2 W1[previous token]`` to the logits of a slot.

    The previous token can be any of V; W2 has a row for each of the Vd tokens that can be proposed.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = LentWeight(draft_vocab_size, rank)

    @torch.no_grad()
    def reset(self) -> None:
        """Start as no Markov head at all: W2 is zero, the rows of W1 are random of length about 1."""
        self.markov_w1.weight.normal_(std=self.markov_w1.embedding_dim**-0.5)
        self.markov_w2.weight.zero_()


class ConfidenceHead(nn.Module):
    """Log-odds that a slot is accepted, given that all slots before it were."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """Map final-normed states [..., D], and Markov rows [..., r] where they are used, to log-odds [...]."""
        joined = hidden if markov is None else torch.cat((hidden, markov), dim=-1)
        return self.proj(joined).squeeze(-1)

    @torch.no_grad()
    def reset(self) -> None:
        """Start at a confidence of one half."""
        self.proj.weight.zero_()
        self.proj.bias.zero_()
