"""Fit the Markov head of a drafter to its target by least squares, before the first step of training.

It is a ridge regression of what the target's last state has and the drafter's has not on the previous token's
embedding, cut to the head's rank. At slot 0 it had better say nothing: the layers know that token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.drafters.blocks.fit import logit_metric
from deepspec.drafters.blocks.least_squares import LeastSquares, root, widen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.drafters.blocks.fit import Example
    from deepspec.drafters.dspark.heads import MarkovHead
    from deepspec.drafters.dspark.model import DSparkDrafter

RIDGE = 0.1  # times the mean square of each input
SILENCE = 4.0  # weight of slot 0 saying nothing, against the other slots saying what they miss
SHARE = 4  # one in so many examples is enough


@torch.no_grad()
def fit_markov(drafter: DSparkDrafter, markov: MarkovHead, examples: Sequence[Example]) -> str:
    """Fit the head of a drafter that proposes something already; return a line that says what was done."""
    head, width = drafter.head, drafter.fc.out_features
    fit = LeastSquares(width, width, drafter.fc.weight.device)
    for batch, features in examples[::SHARE]:
        rows = drafter.supervised_rows(batch)
        states = drafter.block_states(batch, features.hidden).flatten(0, 2)[rows.index].float()
        missing = features.last_hidden.flatten(0, 1)[rows.position].float() - states
        first = rows.slot == 0
        missing.masked_fill_(first[:, None], 0.0)
        fit.add(head.embed(rows.previous).float(), missing, rows.weight * torch.where(first, SILENCE, 1.0))
    before, behind = root(fit.moment), root(logit_metric(drafter))
    left, size, right = torch.linalg.svd(before.half @ fit.solve(RIDGE) @ behind.half, full_matrices=False)
    rank = markov.markov_w1.embedding_dim
    share = size[:rank].sqrt()
    inputs = before.inverse_half @ left[:, :rank] * share  # [D, r]
    outputs = behind.inverse_half @ right[:rank].t() * share
    tokens = torch.arange(head.embedding.shape[0], device=inputs.device)
    markov.markov_w1.weight.copy_(widen(head.embed(tokens).float() @ inputs, rank))
    weight = drafter.draft_head.weight.float()
    markov.markov_w2.weight.copy_(widen(weight @ outputs * head.logit_scale, rank))
    return "the Markov head fitted to the target's last state"
