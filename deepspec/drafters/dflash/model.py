"""DFlash: a drafter that fills a whole block in one pass, its tokens independent of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.contracts import LossOutput
from deepspec.drafters import objective
from deepspec.drafters.blocks.model import BlockDrafter

if TYPE_CHECKING:
    from deepspec.contracts import Batch, Features


class DFlashDrafter(BlockDrafter):
    """The backbone and the target's head."""

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the weighted sums of the loss terms and the detached metrics of a micro-batch."""
        rows = self.supervised_rows(batch)
        states = self.block_states(batch, features.hidden).flatten(0, 2)[rows.index]  # [R, D]
        terms = self.config.terms
        loss = objective.draft_loss(self, terms, rows, states, features)
        return LossOutput(sums={"draft": loss.total}, metrics=objective.draft_metrics(rows, loss, terms))
