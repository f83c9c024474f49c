"""The keys of ``conf/drafter/dspark.yaml``. Imports no torch, so that a configuration composes without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from deepspec.contracts import TargetInfo
    from deepspec.drafters.dspark.model import DSparkDrafter


@dataclass(frozen=True)
class DSparkConfig:
    """DSpark: a parallel block drafter with a semi-autoregressive Markov head and a confidence head."""

    num_layers: int = field(default=5, metadata={"help": "Decoder layers of the drafter"})
    gamma: int = field(default=7, metadata={"help": "Drafted tokens of a block"})
    markov_head: Literal["vanilla", "none"] = field(
        default="vanilla", metadata={"help": "Dependence between the tokens of a block: low-rank Markov, or none"}
    )
    markov_rank: int = field(default=256, metadata={"help": "Rank of the Markov head"})
    confidence_head: bool = field(default=True, metadata={"help": "Train a head that predicts acceptance"})
    confidence_with_markov: bool = field(
        default=True, metadata={"help": "Let the confidence head see the previous token's Markov embedding"}
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Context positions a query sees (w-1 before it); null sees all"}
    )
    init: Literal["random", "target"] = field(
        default="random", metadata={"help": "target copies the target's last layers and sees its own last tap first"}
    )
    intermediate_size: int | None = field(default=None, metadata={"help": "MLP width; null is the target's"})
    ce: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy term"})
    l1: float = field(default=0.9, metadata={"help": "Weight of ||q - p||_1, twice the total variation"})
    confidence: float = field(default=1.0, metadata={"help": "Weight of the confidence term"})
    decay: float = field(default=4.0, metadata={"help": "Slot j weighs exp(-j / decay), j from 0"})

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        raise NotImplementedError

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> DSparkDrafter:
        """Build the drafter with random weights in fp32 on the CPU."""
        raise NotImplementedError
