"""The keys of ``conf/drafter/mtp.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspec.drafters.chains.options import ChainOptions

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.mtp.model import MTPDrafter


@dataclass(frozen=True)
class MTPConfig(ChainOptions):
    """MTP-1: the next-next-token module of DeepSeek-V3, which drafts one token."""

    @property
    def gamma(self) -> int:
        """Drafted tokens of a block."""
        return 1

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> MTPDrafter:
        """Build the drafter with random weights in fp32 on PyTorch's default device."""
        from deepspec.drafters.mtp.model import MTPDrafter

        return MTPDrafter(config=self, target=target, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)
