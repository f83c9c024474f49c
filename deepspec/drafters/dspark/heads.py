"""The small heads of DSpark: a bias that makes the tokens of a block depend on each other, and the confidence.

Every bias is ``W2 f_k``, with f_k of the head's rank r. With e = W1[token before slot k] and h the slot's state:

    vanilla   f_k = e
    gated     f_k = sigmoid(G [h ; e] + b) * e
    rnn       g, c, o = J [s_(k-1) ; e ; h] + b,  s_k = sigmoid(g) s_(k-1) + (1 - sigmoid(g)) tanh(c),  f_k = tanh(o)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

INITIAL_STD = 0.02

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

    recurrent = False
    """Whether a slot's bias depends on more than its own state and the token before it."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:  # noqa: ARG002
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = LentWeight(draft_vocab_size, rank)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:  # noqa: ARG002 - for the heads that look at states
        """Map the states [..., K, D] of slots and the embeddings [..., K, r] of the tokens before to f [..., K, r].

        Unless the head is recurrent, the slots may be of any blocks, in any order.
        """
        return embeddings

    def step(self, state: Tensor, embedding: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return f [r] of one slot, and what the next slot of its block needs to be told."""
        return self(state[None], embedding[None])[0], memory

    @torch.no_grad()
    def reset(self) -> None:
        """Start as no Markov head at all: W2 is zero, the rows of W1 are random of length about 1."""
        self.markov_w1.weight.normal_(std=self.markov_w1.embedding_dim**-0.5)
        self.markov_w2.weight.zero_()


class GatedMarkovHead(MarkovHead):
    """A Markov head whose channels the slot's own state opens and closes."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """See ``MarkovHead``."""
        gate = self.gate_proj(torch.cat((states, embeddings), dim=-1))
        return torch.sigmoid(gate) * embeddings

    @torch.no_grad()
    def reset(self) -> None:
        """Start as no Markov head at all, its gates half open."""
        super().reset()
        self.gate_proj.weight.normal_(std=INITIAL_STD)
        self.gate_proj.bias.zero_()


class RNNHead(MarkovHead):
    """A recurrent head: the bias of a slot depends on all tokens of its block before it."""

    recurrent = True

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, draft_vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """See ``MarkovHead``."""
        memory, found = None, []
        for state, embedding in zip(states.unbind(-2), embeddings.unbind(-2), strict=True):
            bias, memory = self.step(state, embedding, memory)
            found.append(bias)
        return torch.stack(found, dim=-2)

    def step(self, state: Tensor, embedding: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See ``MarkovHead``; any number of blocks at once, [..., D] and [..., r]."""
        before = torch.zeros_like(embedding) if memory is None else memory
        gate, candidate, out = self.joint_proj(torch.cat((before, embedding, state), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * before + (1.0 - gate) * torch.tanh(candidate)

    @torch.no_grad()
    def reset(self) -> None:
        """Start as no head at all, with an empty memory."""
        super().reset()
        self.joint_proj.weight.normal_(std=INITIAL_STD)
        self.joint_proj.bias.zero_()


MARKOV_HEADS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


class BlockBias:
    """The bias of one block, slot after slot, as ``propose`` asks for it."""

    def __init__(self, head: MarkovHead, states: Tensor) -> None:
        self._head, self._states = head, states  # [k, D]
        self._memory: Tensor | None = None
        self.embeddings: list[Tensor] = []
        """[r] of the token before each slot so far."""

    def __call__(self, previous: Tensor) -> Tensor:
        """Return what the next slot adds to its logits [Vd], after the token ``previous`` (0-d)."""
        embedding = self._head.markov_w1.weight[previous]
        features, self._memory = self._head.step(self._states[len(self.embeddings)], embedding, self._memory)
        self.embeddings.append(embedding)
        return torch.mv(self._head.markov_w2.weight, features)


class ConfidenceHead(nn.Module):
    """Log-odds that a slot is accepted, given that all slots before it were."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """Map final-normed states [..., D], and Markov embeddings [..., r] where they are used, to log-odds [...]."""
        joined = hidden if markov is None else torch.cat((hidden, markov), dim=-1)
        return self.proj(joined).squeeze(-1)

    @torch.no_grad()
    def reset(self) -> None:
        """Start at a confidence of one half."""
        self.proj.weight.zero_()
        self.proj.bias.zero_()
