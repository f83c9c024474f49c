"""A reduced draft vocabulary: the tokens that a drafter can propose, and the target's head restricted to them.

A *draft id* counts the tokens that can be proposed in rising order of their target ids. Files hold offsets: target id =
draft id + d2t[draft id]. A token outside has the draft probability 0; decoding stays lossless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.nn.head import FrozenHead

OUTSIDE = -1
"""Draft id of a token that cannot be proposed."""


@dataclass(frozen=True)
class DraftVocabulary:
    """Vd of the target's V tokens."""

    ids: Tensor  # [Vd] int64, the target id of each draft id, rising
    index: Tensor  # [V] int64, the draft id of each target id, or OUTSIDE
    head: FrozenHead  # the target's, restricted to ``ids``

    @classmethod
    def of(cls, head: FrozenHead, ids: Tensor) -> DraftVocabulary:
        """Restrict the target's whole ``head`` to ``ids`` [Vd]; everything lies on the head's device."""
        ids = ids.to(head.weight.device)
        index = torch.full((head.vocab_size,), OUTSIDE, dtype=torch.int64, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, index, head.restricted(ids))

    def spread(self, probabilities: Tensor) -> Tensor:
        """Map distributions over the draft vocabulary [..., Vd] to the target's [..., V], 0 outside."""
        whole = probabilities.new_zeros(*probabilities.shape[:-1], len(self.index))
        return whole.index_copy_(-1, self.ids, probabilities)


def offsets(ids: Tensor) -> Tensor:
    """Return d2t [Vd] of target ids [Vd]."""
    return ids - torch.arange(len(ids), device=ids.device)


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target ids [Vd] that the offsets ``d2t`` [Vd] stand for."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def id_problems(ids: Tensor, vocab_size: int) -> list[str]:
    """List what makes ``ids`` [Vd] no draft vocabulary of a target with ``vocab_size`` tokens."""
    steps = ids.diff() < 1
    problems = []
    if bool(steps.any()):
        at = int(steps.long().argmax())
        problems.append(f"token {int(ids[at + 1])} follows {int(ids[at])}: ids must rise, each once")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        problems.append(f"token {int(outside[0])} is not in 0 .. {vocab_size - 1}, the target's vocabulary")
    return problems
