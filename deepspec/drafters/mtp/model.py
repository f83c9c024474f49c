"""MTP-1: one module that predicts the token after the next (DeepSeek-V3, arXiv 2412.19437, section 2.2).

The target's last state, after its final norm, and the embedding of the next token are normed, joined and projected; one
decoder layer and the shared head follow. The features of other layers are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepspec.drafters.chains.model import ChainDrafter
from deepspec.nn.block import BlockShape
from deepspec.nn.chain import ChainLayer
from deepspec.nn.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.mtp.config import MTPConfig


class MTPDrafter(ChainDrafter):
    """Drafts one token from the target's last state and the token that follows it."""

    def __init__(
        self, *, config: MTPConfig, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__(config=config, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)
        shape = BlockShape.like(target, config.intermediate_size)
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(ChainLayer(shape, head_norms=False) for _ in range(config.num_layers))
        self.reset()

    @property
    def taps(self) -> tuple[int, ...]:
        """No layer: the last state is all that is read."""
        return ()

    def first_states(self, hidden: Tensor, last_hidden: Tensor) -> Tensor:  # noqa: ARG002 - the base's signature
        """Return the target's last states [..., D]."""
        return last_hidden.to(self.norm.weight.dtype)

    def enter(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Join ``states`` [..., D] with ``embeddings`` [..., D] of the next tokens."""
        joined: Tensor = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(states)), dim=-1))
        return joined
