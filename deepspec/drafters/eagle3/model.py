"""Eagle3: features of several layers fused, and one decoder layer over [embedding ; state] (arXiv 2503.01840).

Tensor names are the published ones, which serving stacks load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from deepspec.drafters.chains.model import ChainDrafter
from deepspec.nn.block import BlockShape
from deepspec.nn.chain import ChainLayer

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.eagle3.config import Eagle3Config


class Eagle3Drafter(ChainDrafter):
    """Drafts token by token from the target's fused features."""

    def __init__(
        self, *, config: Eagle3Config, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__(config=config, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)
        shape = BlockShape.like(target, config.intermediate_size)
        self.fc = nn.Linear(len(target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            ChainLayer(shape, wide=index == 0, head_norms=config.qk_norm) for index in range(config.num_layers)
        )
        self.reset()

    def first_states(self, hidden: Tensor, last_hidden: Tensor) -> Tensor:  # noqa: ARG002 - the base's signature
        """Fuse the target's features [..., C*D] to [..., D]."""
        states: Tensor = self.fc(hidden.to(self.fc.weight.dtype))
        return states
