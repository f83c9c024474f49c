"""Is the speculative output the target's own? Greedy texts are compared token for token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.evaluation.acceptance import Decoded
    from deepspec.inference.decoder import DecodingTarget

TIE = 1e-5
"""Two logits closer than this are a tie: their order depends on how many rows a product had."""


@dataclass(frozen=True)
class Divergence:
    """The first token in which two greedy texts differ."""

    prompt_id: str
    index: int
    plain_token: int
    other_token: int
    logit_gap: float


@dataclass(frozen=True)
class LosslessReport:
    """The comparison of all prompts."""

    prompts: int
    equal: int
    ties: list[Divergence] = field(default_factory=list)
    differing: list[Divergence] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        """True when no text differs by more than a tie."""
        return not self.differing


def compare_greedy(target: DecodingTarget, plain: Sequence[Decoded], other: Sequence[Decoded]) -> LosslessReport:
    """Compare two greedy decodings of the same prompts."""
    ties: list[Divergence] = []
    differing: list[Divergence] = []
    for one, two in zip(plain, other, strict=True):
        found = _divergence(target, one, two)
        if found is not None:
            (ties if found.logit_gap < TIE else differing).append(found)
    return LosslessReport(len(plain), len(plain) - len(ties) - len(differing), ties, differing)


def _divergence(target: DecodingTarget, plain: Decoded, other: Decoded) -> Divergence | None:
    mine, theirs = plain.generation.tokens, other.generation.tokens
    if mine == theirs:
        return None
    shared = min(len(mine), len(theirs))
    index = next((i for i in range(shared) if mine[i] != theirs[i]), shared)
    if index == shared:  # one text goes on where the other ended
        return Divergence(plain.prompt.id, index, -1, -1, float("inf"))
    gap = _logit_gap(target, [*plain.prompt.ids, *mine[:index]], mine[index], theirs[index])
    return Divergence(plain.prompt.id, index, mine[index], theirs[index], gap)


@torch.inference_mode()
def _logit_gap(target: DecodingTarget, text: list[int], first: int, second: int) -> float:
    ids = torch.tensor([text], device=target.device)
    logits = target.step(ids, target.new_cache(len(text)), (), num_logits=1).logits[-1]
    return float((logits[first] - logits[second]).abs())
