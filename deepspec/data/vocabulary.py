"""The tokens that a drafter with a reduced vocabulary can propose: the most frequent ones of the training answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from deepspec.data.samples import SampleSet


@dataclass(frozen=True)
class ChosenTokens:
    """Target ids in rising order, and the share of the supervised training tokens that are among them."""

    ids: Tensor  # [Vd] int64
    covered: float

    def line(self, vocab_size: int) -> str:
        """Return the choice for a person."""
        size = len(self.ids)
        return f"draft vocabulary: {size} of {vocab_size} tokens, {self.covered:.2%} of the supervised training tokens"


def choose_tokens(samples: SampleSet, size: int, vocab_size: int, always: Collection[int] = ()) -> ChosenTokens:
    """Return the ``size`` most frequent supervised tokens.

    Of equally frequent ones those that come more often in the prompts go first (answers repeat words of their prompts),
    and then the lower ids, which tokenisers give to more frequent tokens.

    Args:
        samples: The training samples.
        size: Tokens to choose (Vd).
        vocab_size: The target's vocabulary (V).
        always: Tokens that are among them however rare they are: the target's end-of-turn tokens.

    Raises:
        ConfigError: ``size`` is above the target's vocabulary, or leaves no room for ``always``.
    """
    kept = sorted({token for token in always if 0 <= token < vocab_size})
    if not len(kept) <= size <= vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size={size} must be in {max(2, len(kept))} .. {vocab_size}: the target has "
            f"{vocab_size} tokens, of which its {len(kept)} end-of-turn tokens are always kept"
        )
    counts = torch.bincount(samples.input_ids[samples.loss_mask.bool()], minlength=vocab_size)  # [V]
    everywhere = torch.bincount(samples.input_ids, minlength=vocab_size)  # [V]
    rank = counts * (everywhere.max() + 1) + everywhere
    rank[kept] = rank.max() + 1
    ids = rank.argsort(descending=True, stable=True)[:size].sort().values
    return ChosenTokens(ids, int(counts[ids].sum()) / max(1, int(counts.sum())))
