"""The accepted length that drafter and target promise, without drawing a single acceptance.

A slot is kept with probability 1 - TV(p, q) before its token is known. Along a decoded text, with q formed after the
text's own tokens, the expected accepted length at an anchor is 1 + sum over slots of the products of those chances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.contracts import Committed
from deepspec.evaluation.acceptance import expected_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.drafters.base import Drafter
    from deepspec.evaluation.acceptance import Decoded
    from deepspec.inference.decoder import DecodingTarget


class ForcedSampler:
    """A token sampler that reports the distributions, but lets the drafter go on with the tokens of a given text."""

    def __init__(self, text: Sequence[int], temperature: float) -> None:
        self._text = iter(text)
        self._temperature = temperature

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Map ``logits`` [V] to (the text's next token, probabilities [V] fp32); [Vd] for the tokens ``ids`` [Vd]."""
        token = torch.tensor(next(self._text), device=logits.device)
        return token, torch.softmax(logits.float() / self._temperature, dim=-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Return 1/2 sum |p - q| over the last dimension."""
    return 0.5 * (p - q).abs().sum(dim=-1)


@torch.inference_mode()
def expected_lengths(
    target: DecodingTarget,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    anchors: Sequence[int],
    temperature: float = 1.0,
    gamma: int | None = None,
) -> list[float]:
    """Return the expected accepted length at each anchor of one decoded text.

    Args:
        target: the frozen target.
        drafter: bound to it.
        prompt_ids: the prompt.
        answer: the tokens that were decoded.
        anchors: rising indices into ``answer``; one whose block the end of the text cuts is left out.
            (Counted as a whole block it would seem to promise less.)
        temperature: of both distributions, above 0.
        gamma: slots of a block; the drafter's own by default.
    """
    gamma = gamma or drafter.conventions.gamma
    text = [*prompt_ids, *answer]
    cache = target.new_cache(len(text))
    stepped = target.step(torch.tensor([text], device=target.device), cache, drafter.taps)
    read = Committed(text, stepped.hidden, stepped.last_hidden)
    state, known, lengths = drafter.start(len(text) + gamma), 0, []
    starts = [len(prompt_ids) + a for a in anchors]
    for position in (p for p in starts if p + gamma < len(text)):
        drafter.extend(state, read.part(known, position))
        known = position
        forced = ForcedSampler(text[position + 1 :], temperature)
        q = drafter.propose(state, text[position], gamma, forced).probabilities  # [K, V]
        p = torch.softmax(stepped.logits[position : position + gamma] / temperature, dim=-1)
        lengths.append(expected_length((1.0 - total_variation(p, q)).tolist()))
    return lengths


def round_anchors(decoded: Decoded) -> list[int]:
    """Return where the rounds of a decoded text began: indices of their anchors in the answer."""
    anchors, at = [], 0
    for item in decoded.generation.rounds:
        anchors.append(at)
        at += item.committed
    return anchors


def estimate(
    target: DecodingTarget,
    drafter: Drafter,
    decoded: Sequence[Decoded],
    temperature: float = 1.0,
    gamma: int | None = None,
) -> float:
    """Return the mean expected accepted length over the whole blocks of all decoded texts; nan without any.

    The blocks begin where the rounds of the texts did.
    """
    lengths: list[float] = []
    for item in decoded:
        anchors = round_anchors(item)
        tokens = item.generation.tokens
        lengths += expected_lengths(target, drafter, item.prompt.ids, tokens, anchors, temperature, gamma)
    return sum(lengths) / len(lengths) if lengths else float("nan")
