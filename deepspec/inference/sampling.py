"""From logits to a token and the very probabilities it was drawn from.

One ``Sampler`` serves one generation. The drafter and the acceptance rule both go through it, so the distribution a
draft token was drawn from and the one it is judged by are the same fp32 tensor, whatever the logits' precision was.
All randomness of a generation comes from its one generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SamplerSettings:
    """How tokens are chosen. Temperature 0 is greedy: the limit in which every distribution is a single token."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise UserError(f"temperature is {self.temperature}, but it must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}, but it must be 1 or more; leave it out to keep every token")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}, but it must lie in (0, 1]; leave it out to keep every token")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0


class Sampler:
    """Draws tokens under one ``SamplerSettings``; the ``TokenSampler`` that a drafter is given."""

    def __init__(self, settings: SamplerSettings, device: torch.device | str = "cpu") -> None:
        self.settings = settings
        self.generator = torch.Generator(device=device).manual_seed(settings.seed)

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map ``logits`` [V] to (token: 0-d int64, probabilities: [V] fp32 it was drawn from).

        With ``ids`` [Vd] both are about these tokens alone: [Vd] logits give a token out of ``ids``, and [Vd].
        """
        if self.settings.greedy:
            place = logits.argmax(dim=-1)
            probabilities = _one_hot(place, logits)
        else:
            probabilities = self.probabilities(logits)
            place = self.draw(probabilities)
        return (place if ids is None else ids[place]), probabilities

    def probabilities(self, logits: Tensor) -> Tensor:
        """Map ``logits`` [..., V] of any precision to the fp32 distributions that tokens are drawn from."""
        if self.settings.greedy:
            return _one_hot(logits.argmax(dim=-1), logits)
        probabilities = torch.softmax(logits.float() / self.settings.temperature, dim=-1)
        return _truncate(probabilities, self.settings.top_k, self.settings.top_p)

    def draw(self, probabilities: Tensor) -> Tensor:
        """Draw one token from each row of ``probabilities`` [..., V] by an exponential race; zeros never win."""
        race = torch.empty_like(probabilities).exponential_(generator=self.generator)
        return (probabilities / race).argmax(dim=-1)

    def uniforms(self, shape: tuple[int, ...]) -> Tensor:
        """Draw fp32 numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device)


def _one_hot(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return distributions of the shape of ``logits`` [..., V] that hold ``tokens`` [...] for certain."""
    empty = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return empty.scatter_(-1, tokens.unsqueeze(-1), 1.0)


def _truncate(probabilities: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Zero all but the ``top_k`` likeliest tokens and those past mass ``top_p`` of [..., V], and renormalise."""
    if top_k is None and top_p is None:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        keep[..., top_k:] = False
    if top_p is not None:
        keep &= (ordered.cumsum(dim=-1) - ordered) < top_p
    kept = torch.zeros_like(probabilities).scatter_(-1, order, ordered * keep)
    return kept / kept.sum(dim=-1, keepdim=True)
