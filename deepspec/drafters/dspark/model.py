"""DSpark: a parallel block drafter whose tokens depend on each other through a small Markov head.

A block at anchor position a takes the anchor's token and K-1 mask tokens at positions a .. a+K-1; slot j predicts the
token at a+1+j. The target's features of positions < a enter every layer as keys and values; inside the block attention
is bidirectional. Tensor names are the published ones, which serving stacks load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from deepspec.contracts import Conventions
from deepspec.drafters.base import Drafter
from deepspec.drafters.dspark import objective, propose
from deepspec.drafters.dspark.fit import fit_first_layer
from deepspec.drafters.dspark.heads import ConfidenceHead, MarkovHead
from deepspec.drafters.dspark.initialise import initialise_from
from deepspec.nn.block import BlockShape, DrafterLayer
from deepspec.nn.masks import block_mask, block_positions
from deepspec.nn.norm import RMSNorm
from deepspec.nn.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Features, LossOutput, Proposal, TargetInfo, TokenSampler
    from deepspec.drafters.dspark.config import DSparkConfig
    from deepspec.drafters.dspark.propose import DecodingState
    from deepspec.nn.attention import AttentionBackend
    from deepspec.nn.block import Rotation

INITIAL_STD = 0.02


class BlockArguments(NamedTuple):
    """What a layer reads, apart from its weights."""

    x: Tensor  # [B, A*K, D] the states of the slots
    context: Tensor  # [B, T, D]
    rotation: Rotation  # of the slots
    context_rotation: Rotation
    mask: Tensor | None  # [B, 1, A*K, T + A*K]


class DSparkDrafter(Drafter):
    """The drafter's backbone with its Markov and confidence heads."""

    attention_backend: AttentionBackend = "sdpa"

    def __init__(
        self, *, config: DSparkConfig, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.conventions = Conventions(
            block_layout="anchor_first",
            gamma=config.gamma,
            target_layer_ids=tuple(target_layer_ids),
            mask_token_id=mask_token_id,
            sliding_window=config.sliding_window,
        )
        self.coefficients = objective.coefficients(config)
        if config.draft_vocab_size is not None:
            self.reduce_vocabulary(config.draft_vocab_size, target.vocab_size)
        shape = block_shape(config, target)
        width = shape.hidden_size
        self.fc = nn.Linear(len(target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps=shape.rms_norm_eps)
        drafted = config.draft_vocab_size or target.vocab_size
        self.markov_head = MarkovHead(target.vocab_size, drafted, config.markov_rank) if config.uses_markov else None
        seen = config.markov_rank if config.confidence_sees_markov else 0
        self.confidence_head = ConfidenceHead(width, seen) if config.confidence_head else None
        self.rope = RotaryEmbedding(
            target.rope_parameters, head_dim=shape.head_dim, max_position=target.max_position_embeddings
        )
        self._reset()

    @torch.no_grad()
    def _reset(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=INITIAL_STD)
        if self.markov_head is not None:
            self.markov_head.reset()
        if self.confidence_head is not None:
            self.confidence_head.reset()

    @property
    def decoder_layers(self) -> list[DrafterLayer]:
        """The layers, typed."""
        return cast("list[DrafterLayer]", list(self.layers))

    def initialise_from(self, target_model: nn.Module) -> list[str]:
        """Copy what fits from the target's own layers; return a line for each part that was taken."""
        return initialise_from(self, target_model, first=1 if self.config.init == "fitted" else 0)

    def fit(self, examples: Sequence[tuple[Batch, Features]]) -> list[str]:
        """Fit the first layer and the Markov head by least squares; return a line for each part."""
        return fit_first_layer(self, examples)

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weight (0-d fp32) of each loss term, from the batch alone."""
        return objective.denominators(self.config, batch)

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the weighted sums of the loss terms and the detached metrics of a micro-batch."""
        return objective.score(self, batch, features, self.block_states(batch, features.hidden))

    def context(self, hidden: Tensor) -> Tensor:
        """Map the target's features [..., C*D] to what every layer reads as keys and values, [..., D]."""
        return self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))

    def block_inputs(self, anchors: Tensor) -> Tensor:
        """Embed blocks for anchor tokens [...] as [..., K, D]: the anchor, then masks."""
        mask = torch.full_like(anchors, self.conventions.mask_token_id)
        ids = torch.stack((anchors, *[mask] * (self.conventions.gamma - 1)), dim=-1)
        return self.head.embed(ids).to(self.norm.weight.dtype)

    def block_arguments(self, batch: Batch, hidden: Tensor) -> BlockArguments:
        """Return what the first layer reads, the blocks of all anchors side by side."""
        return self.arguments_around(batch, self.context(hidden))

    def slot_inputs(self, batch: Batch) -> Tensor:
        """Embed the slots of all anchors side by side, [B, A*K, D]."""
        return self.block_inputs(batch.input_ids.gather(1, batch.anchor_indices)).flatten(1, 2)

    def arguments_around(self, batch: Batch, context: Tensor) -> BlockArguments:
        """Return what the first layer reads, for a context [B, T, D] that is known already."""
        gamma, x = self.conventions.gamma, self.slot_inputs(batch)
        slots = block_positions(batch, gamma).flatten(1)[:, None]  # [B, 1, A*K]
        return BlockArguments(
            x=x,
            context=context,
            rotation=self.rope(slots, x.dtype),
            context_rotation=self.rope(batch.position_ids[:, None], x.dtype),
            mask=block_mask(batch, gamma, self.conventions.sliding_window),
        )

    def block_states(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Run the blocks of all anchors side by side; return final-normed states [B, A, K, D]."""
        arguments = self.block_arguments(batch, hidden)
        for layer in self.layers:
            arguments = arguments._replace(x=layer(*arguments, self.attention_backend))
        return self.norm(arguments.x).unflatten(1, (-1, self.conventions.gamma))

    def start(self, max_length: int) -> DecodingState:
        """Return an empty decoding state for one sequence of at most ``max_length`` positions."""
        return propose.start(self, max_length)

    def extend(self, state: DecodingState, hidden: Tensor) -> None:
        """Append the target's features [t, C*D] of the next t committed positions to the state."""
        propose.extend(self, state, hidden)

    def propose(self, state: DecodingState, anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:
        """Draft ``num_tokens <= gamma`` tokens after ``anchor``, which sits right behind the state's positions."""
        return propose.propose(self, state, anchor, num_tokens, sampler)


def block_shape(config: DSparkConfig, target: TargetInfo) -> BlockShape:
    """Return the widths of the drafter's layers: the target's own, except for the MLP where the config says so."""
    return BlockShape(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
    )
