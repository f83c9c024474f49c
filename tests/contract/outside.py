"""A whole drafter from outside the package, as `docs/adding-a-drafter.md` describes it: a bigram with a context.

Slot j's state is a linear map of the target's features before the anchor, another one of the token before the slot's
own, and a vector for each slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspec.contracts import Conventions, LossOutput, Proposal
from deepspec.drafters import objective
from deepspec.drafters.base import Drafter, require_finite
from deepspec.drafters.objective import Terms

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch, Committed, Features, TargetInfo, TokenSampler

TERMS = Terms(ce=0.1, l1=0.9)


@dataclass(frozen=True)
class BigramConfig:
    gamma: int = 3

    def problems(self) -> list[str]:
        return []

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> BigramDrafter:
        return BigramDrafter(self, target, target_layer_ids, mask_token_id)


class BigramDrafter(Drafter):
    def __init__(
        self, config: BigramConfig, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.conventions = Conventions("anchor_first", config.gamma, tuple(target_layer_ids), mask_token_id, None)
        self.coefficients = {"draft": 1.0}
        self.of_context = nn.Linear(len(target_layer_ids) * target.hidden_size, target.hidden_size, bias=False)
        self.of_token = nn.Linear(target.hidden_size, target.hidden_size, bias=False)
        self.of_slot = nn.Parameter(torch.zeros(config.gamma, target.hidden_size))

    def _states(self, context: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        embeddings = self.head.embed(tokens).to(self.of_token.weight.dtype)
        return self.of_context(context) + self.of_token(embeddings) + self.of_slot[slots]

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        return {"draft": objective.total_weight(batch, (1.0,) * self.config.gamma)}

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        rows = objective.supervised_rows(batch, self.conventions, (1.0,) * self.config.gamma)
        anchor = rows.position - rows.slot
        hidden = features.hidden.flatten(0, 1)[anchor - 1]
        starts = batch.position_ids.flatten()[anchor] == 0
        states = self._states(hidden.masked_fill(starts[:, None], 0.0), rows.previous, rows.slot)
        loss = objective.draft_loss(self, TERMS, rows, states, features)
        return LossOutput({"draft": loss.total}, objective.draft_metrics(rows, loss, TERMS))

    def start(self, max_length: int) -> list[Tensor]:  # noqa: ARG002
        return [self.of_slot.new_zeros(self.of_context.in_features)]

    @torch.no_grad()
    def extend(self, state: list[Tensor], committed: Committed) -> None:
        if committed.tokens:
            state[0] = committed.hidden[-1].to(self.of_slot.dtype)

    @torch.no_grad()
    def propose(self, state: list[Tensor], anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:
        token, tokens, probabilities = torch.tensor(anchor, device=state[0].device), [], []
        for slot in range(num_tokens):
            logits = self.head.logits(self._states(state[0], token, torch.tensor(slot))).float()
            require_finite(logits)
            token, q = sampler(logits)
            tokens.append(token)
            probabilities.append(q)
        return Proposal(torch.stack(tokens), torch.stack(probabilities))
