"""A stand-in target that repeats a known greedy text.

What a proposer would have got accepted on a text follows from the text alone, so a proposer that needs no features is
scored through the real loop without running the model again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.evaluation.acceptance import Decoded
from deepspec.inference.decoder import SpeculativeDecoder

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from deepspec.inference.proposers import Proposer


@dataclass(frozen=True)
class _Step:
    logits: Tensor  # [n, V]
    hidden: Tensor  # [t, 0]
    last_hidden: Tensor  # [t, 0]


class ReplayTarget:
    """Says after each position what the text says there."""

    device = torch.device("cpu")

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self._text, self._vocab_size = list(text), vocab_size

    def new_cache(self, max_length: int) -> list[int]:  # noqa: ARG002 - the protocol's signature
        """Return the number of positions read, in a list."""
        return [0]

    def step(
        self,
        input_ids: Tensor,
        cache: list[int],
        layer_ids: tuple[int, ...],  # noqa: ARG002 - the protocol's signature
        *,
        num_logits: int | None = None,
    ) -> _Step:
        """Return logits that are 1 at the text's next token."""
        cache[0] += input_ids.shape[1]
        count = num_logits or input_ids.shape[1]
        following = self._text[cache[0] - count + 1 : cache[0] + 1]
        tokens = torch.tensor(following + [0] * (count - len(following)))
        logits = torch.zeros(count, self._vocab_size).scatter_(1, tokens.unsqueeze(1), 1.0)
        nothing = torch.empty(input_ids.shape[1], 0)
        return _Step(logits, nothing, nothing)

    def crop(self, cache: list[int], length: int) -> None:
        """Forget what lies behind ``length``."""
        cache[0] = length


def replay(
    plain: Sequence[Decoded], proposer: Proposer, vocab_size: int, max_new_tokens: int, stop_ids: Collection[int]
) -> list[Decoded]:
    """Decode the texts of ``plain`` (greedy) again under the same limits, with ``proposer`` and without the model."""
    replayed = []
    for item in plain:
        target = ReplayTarget([*item.prompt.ids, *item.generation.tokens], vocab_size)
        decoder = SpeculativeDecoder(target, proposer)
        generation = decoder.generate(item.prompt.ids, max_new_tokens, stop_ids=stop_ids)
        replayed.append(Decoded(item.prompt, generation))
    return replayed
