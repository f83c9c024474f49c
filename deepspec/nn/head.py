"""The target's frozen embedding and language-model head, with everything a family does around them.

The target and every drafter use one and the same ``FrozenHead``; its tensors are never trained, saved or copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import TargetInfo


@dataclass(frozen=True)
class FrozenHead:
    """Embedding and head of a target: ``logits = softcap(logit_scale * (W h + b))``."""

    embedding: Tensor  # [V, D]
    weight: Tensor  # [V, D]; the same tensor as ``embedding`` when the target ties them
    bias: Tensor | None = None  # [V]
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @classmethod
    def from_tensors(
        cls, info: TargetInfo, embedding: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> FrozenHead:
        """Build the head of the target that ``info`` describes; the tensors are shared and cut off from autograd."""
        shared = embedding.detach()
        tied = embedding.data_ptr() == weight.data_ptr() and embedding.shape == weight.shape
        return cls(
            embedding=shared,
            weight=shared if tied else weight.detach(),
            bias=None if bias is None else bias.detach(),
            embed_scale=info.embed_scale,
            logit_scale=info.logit_scale,
            logit_softcap=info.logit_softcap,
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.weight.shape[0]

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.weight is self.embedding

    def restricted(self, ids: Tensor) -> FrozenHead:
        """Return the head with the rows ``ids`` [Vd] alone (a copy of them); the embedding stays the whole one."""
        return FrozenHead(
            embedding=self.embedding,
            weight=self.weight[ids],
            bias=None if self.bias is None else self.bias[ids],
            embed_scale=self.embed_scale,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Map token ids [...] to the target's own embedding output [..., D]."""
        rows = functional.embedding(ids, self.embedding)
        return rows if self.embed_scale == 1.0 else rows * torch.tensor(self.embed_scale, dtype=rows.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map final-normed states [..., D] to the target's logits [..., V], in the precision of the weights."""
        return self.finish(functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    def finish(self, raw: Tensor) -> Tensor:
        """Apply scale and soft-cap to ``W h + b``."""
        if self.logit_scale != 1.0:
            raw = raw * self.logit_scale
        if self.logit_softcap is not None:
            raw = torch.tanh(raw / self.logit_softcap) * self.logit_softcap
        return raw

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FrozenHead:
        """Return the head on another device or in another precision; tied weights stay one tensor."""
        embedding = self.embedding.to(device=device, dtype=dtype)
        return FrozenHead(
            embedding=embedding,
            weight=embedding if self.tied else self.weight.to(device=device, dtype=dtype),
            bias=None if self.bias is None else self.bias.to(device=device, dtype=dtype),
            embed_scale=self.embed_scale,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
        )
