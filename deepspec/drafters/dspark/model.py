"""DSpark: a parallel block drafter whose tokens depend on each other through a small sequential head.

The backbone is that of all block drafters, anchor-first. Tensor names are the published ones, as serving stacks load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.contracts import LossOutput, Ratio
from deepspec.drafters import objective
from deepspec.drafters.blocks.model import BlockDrafter
from deepspec.drafters.dspark.fit import fit_markov
from deepspec.drafters.dspark.heads import MARKOV_HEADS, BlockBias, ConfidenceHead, MarkovHead
from deepspec.losses.rows import binary_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Features, TargetInfo
    from deepspec.drafters.blocks.decoding import TokenBias
    from deepspec.drafters.dspark.config import DSparkConfig
    from deepspec.drafters.objective import Rows
    from deepspec.losses.fused import BlockLoss


class DSparkDrafter(BlockDrafter):
    """The backbone with a Markov and a confidence head."""

    config: DSparkConfig

    def __init__(
        self, *, config: DSparkConfig, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__(config=config, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)
        width, rank = target.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if config.uses_markov:
            drafted = config.draft_vocab_size or target.vocab_size
            self.markov_head = MARKOV_HEADS[config.markov_head](target.vocab_size, drafted, rank, width)
            self.markov_head.reset()
        if config.confidence_head:
            self.coefficients = {**self.coefficients, "confidence": config.confidence}
            self.confidence_head = ConfidenceHead(width, rank if config.confidence_sees_markov else 0)
            self.confidence_head.reset()

    def fit(self, examples: Sequence[tuple[Batch, Features]]) -> list[str]:
        """Fit the first layer and the Markov head by least squares; return a line for each part."""
        lines = super().fit(examples)
        if self.markov_head is None:
            return lines
        if self.config.markov_head != "vanilla":
            return [*lines, f"the {self.config.markov_head} head is not fitted"]
        return [*lines, fit_markov(self, self.markov_head, examples)]

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the weighted sums of the loss terms and the detached metrics of a micro-batch."""
        rows = self.supervised_rows(batch)
        hidden = self.block_states(batch, features.hidden)  # [B, A, K, D]
        states = hidden.flatten(0, 2)[rows.index]  # [R, D]
        embeddings = None if self.markov_head is None else self.markov_head.markov_w1(rows.previous)  # [R, r]
        loss = self._draft_loss(rows, states, embeddings, features, hidden, batch)
        sums, metrics = {"draft": loss.total}, objective.draft_metrics(rows, loss, self.config.terms)
        if self.confidence_head is not None:
            seen = embeddings if self.config.confidence_sees_markov else None
            logits = self.confidence_head(states, seen).float()  # [R]
            sums["confidence"] = (rows.weight * binary_cross_entropy(logits, loss.acceptance)).sum()
            error = (logits.detach().sigmoid() - loss.acceptance).abs()
            metrics["confidence"] = Ratio(sums["confidence"].detach(), rows.weight.sum())
            metrics["confidence_error"] = Ratio(error.sum(), rows.mask.sum().float())
        return LossOutput(sums=sums, metrics=metrics)

    def token_bias(self, states: Tensor) -> TokenBias | None:
        """Return the Markov head's bias along one block, of ``states`` [k, D]."""
        return None if self.markov_head is None else BlockBias(self.markov_head, states)

    @property
    def predicts_acceptance(self) -> bool:
        """Whether there is a confidence head."""
        return self.confidence_head is not None

    def confidence_logits(self, states: Tensor, bias: TokenBias | None) -> Tensor | None:
        """Return the log-odds [k] that each drafted token is accepted, or None without a confidence head."""
        if self.confidence_head is None:
            return None
        seen = isinstance(bias, BlockBias) and self.config.confidence_sees_markov
        embeddings = torch.stack(bias.embeddings) if seen and isinstance(bias, BlockBias) else None
        logits: Tensor = self.confidence_head(states, embeddings).float()
        return logits

    def _draft_loss(
        self,
        rows: Rows,
        states: Tensor,
        embeddings: Tensor | None,
        features: Features,
        hidden: Tensor,
        batch: Batch,
    ) -> BlockLoss:
        head, terms = self.markov_head, self.config.terms
        if head is None or embeddings is None:
            return objective.draft_loss(self, terms, rows, states, features)
        if head.recurrent:  # whole blocks, since a slot depends on all before it
            tokens = batch.input_ids.gather(1, objective.slot_indices(batch, self.config.gamma).flatten(1))
            blocks = head.markov_w1(tokens).view(*hidden.shape[:3], -1)
            biased = head(hidden, blocks).flatten(0, 2)[rows.index]
        else:
            biased = head(states, embeddings)
        return head.markov_w2(
            lambda w2: objective.draft_loss(self, terms, rows, states, features, objective.LogitBias(biased, w2))
        )
