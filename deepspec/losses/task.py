"""What a pass over draft rows is asked: who judges them, how much they weigh, and of which terms their loss is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.nn.head import FrozenHead
    from deepspec.nn.vocabulary import DraftVocabulary

LossMode = Literal["exact", "common_mode", "bf16_logits"]
BUFFERS = 3  # of size [chunk rows, Vd]
ACCEPTANCE_FLOOR = 1e-4  # below it LK's gradient grows no more
WHOLE_BUFFERS = 2  # of size [chunk positions, V], for a reduced vocabulary
CHUNK_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Memory of a chunk's buffers. Measured on two cores, a product with the head costs half as much a row at 256 rows as
at 64, since the head's weights are read once a chunk; the passes over the logits cost the same at any size."""


class Parts(NamedTuple):
    """What the loss of R rows is made of, [R] each."""

    ce: Tensor
    soft: Tensor
    entropy: Tensor
    l1: Tensor
    reverse: Tensor
    jsd: Tensor


class Pace(NamedTuple):
    """D-PACE (arXiv 2605.18810): a row weighs what its log-probability adds to the expected accepted length.

    Its weight comes from what the draft gives to the labels of its whole block (``rows.pace_weights``), and
    multiplies the task's; no gradient flows through it. A label outside the draft's vocabulary has chance 0.
    """

    smoothing: float  # alpha
    block: Tensor  # [R] the same number for the rows of a block
    slot: Tensor  # [R] place in the block, from 0 without a gap
    gamma: int  # slots of a block


@dataclass(frozen=True)
class RowTask:
    """Everything of a pass that needs no gradient."""

    target_hidden: Tensor  # [U, D] final-normed states of the target
    target_index: Tensor  # [R] row of target_hidden that judges each draft row
    labels: Tensor  # [R]
    weights: Tensor  # [R]
    head: FrozenHead  # the target's, over V
    ce: float
    l1: float
    mode: LossMode = "exact"
    chunk_rows: int | None = None  # None: as many as fit CHUNK_BYTES
    vocabulary: DraftVocabulary | None = None  # None: the draft's vocabulary is the target's
    soft: float = 0.0
    lk: float = 0.0
    mix: float = 0.0
    eta: float = 1.0
    target_log_sum: Tensor | None = None  # [U] log sum exp of the target's logits over V, if known
    target_top: Tensor | None = None  # [U] its likeliest token; known with the sum
    reverse: float = 0.0
    jsd: float = 0.0
    pace: Pace | None = None  # None: the weights are the task's

    @property
    def draft_head(self) -> FrozenHead:
        """The head of the draft's logits, over Vd."""
        return self.head if self.vocabulary is None else self.vocabulary.head

    @property
    def needs_whole_rows(self) -> bool:
        """Whether the target's logits are formed over V although the draft's are over fewer tokens."""
        return self.vocabulary is not None and self.target_log_sum is None

    @property
    def judge_head(self) -> FrozenHead:
        """The head of the target's logits as far as they are formed."""
        return self.head if self.needs_whole_rows else self.draft_head

    @property
    def row_elements(self) -> int:
        """Most elements of the buffers for one row of a chunk."""
        whole = WHOLE_BUFFERS * self.head.vocab_size if self.needs_whole_rows else 0
        return self.num_buffers * self.draft_head.vocab_size + whole

    @property
    def num_buffers(self) -> int:
        """Buffers with a row of Vd for each row of a chunk."""
        return BUFFERS + self.uses_scratch + self.uses_ratio

    @property
    def uses_soft(self) -> bool:
        """Whether the cross-entropy against the target's distribution is needed."""
        return self.soft != 0 or self.mix != 0

    @property
    def uses_ratio(self) -> bool:
        """Whether log(p / q) of every token is needed, in the last buffer."""
        return self.reverse != 0 or self.jsd != 0

    @property
    def uses_scratch(self) -> bool:
        """Whether a buffer for passing results is needed, behind the first ones."""
        return self.uses_soft or self.jsd != 0

    def value(self, parts: Parts) -> Tensor:
        """Return the loss [R] of rows from their parts."""
        found = self.ce * parts.ce + self.soft * parts.soft + self.l1 * parts.l1
        if self.uses_ratio:
            found = found + self.reverse * parts.reverse + self.jsd * parts.jsd
        if self.lk:
            found = found - self.lk * _acceptance(parts.l1).log()
        if self.mix:
            share = torch.exp(-self.eta * _acceptance(parts.l1))
            found = found + self.mix * (share * (parts.soft - parts.entropy) + (1.0 - share) * 0.5 * parts.l1)
        return found

    def factors(self, l1: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the gradients of S and of L1 are multiplied by in each row, both like ``l1``."""
        acceptance, of_soft, of_l1 = _acceptance(l1), torch.full_like(l1, self.soft), torch.full_like(l1, self.l1)
        if self.lk:
            of_l1 = of_l1 + 0.5 * self.lk / acceptance
        if self.mix:
            share = torch.exp(-self.eta * acceptance)
            of_soft, of_l1 = of_soft + self.mix * share, of_l1 + 0.5 * self.mix * (1.0 - share)
        return of_soft, of_l1


def _acceptance(l1: Tensor) -> Tensor:
    return (1.0 - 0.5 * l1).clamp(min=ACCEPTANCE_FLOOR)
