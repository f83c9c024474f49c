"""The backbone of drafters that fill a whole block in one pass.

A block at anchor position a takes the anchor's token and mask tokens. Anchor-first: the anchor and K-1 masks at
a .. a+K-1, slot j predicts the token at a+1+j. Fill-in: the anchor and K masks at a .. a+K, each mask predicts the
token at its own position, and the anchor's row predicts nothing. The target's features of positions < a enter every
layer as keys and values; inside the block attention is bidirectional. Tensor names are the published ones, which
serving stacks load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from deepspec.contracts import Conventions
from deepspec.drafters import objective
from deepspec.drafters.base import Drafter
from deepspec.drafters.blocks import decoding
from deepspec.drafters.blocks.fit import fit_first_layer
from deepspec.drafters.blocks.initialise import initialise_from
from deepspec.nn.block import BlockShape, DrafterLayer
from deepspec.nn.masks import block_positions, block_visible
from deepspec.nn.norm import RMSNorm
from deepspec.nn.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Batch, Committed, Features, Proposal, TargetInfo, TokenSampler
    from deepspec.drafters.blocks.decoding import DecodingState, TokenBias
    from deepspec.drafters.blocks.options import BlockOptions
    from deepspec.drafters.objective import Rows
    from deepspec.nn.attention import Visible
    from deepspec.nn.block import Rotation

INITIAL_STD = 0.02


class BlockArguments(NamedTuple):
    """What a layer reads, apart from its weights; N is the size of a block."""

    x: Tensor  # [B, A*N, D] the states of the rows
    context: Tensor  # [B, T, D]
    rotation: Rotation  # of the rows
    context_rotation: Rotation
    mask: Visible  # [B, 1, A*N, T + A*N]


class BlockDrafter(Drafter):
    """The backbone: features of the target in, final-normed states of whole blocks out."""

    def __init__(
        self, *, config: BlockOptions, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int
    ) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.conventions = Conventions(
            block_layout=config.block_layout,
            gamma=config.gamma,
            target_layer_ids=tuple(target_layer_ids),
            mask_token_id=mask_token_id,
            sliding_window=config.sliding_window,
        )
        self.coefficients = {"draft": 1.0}
        if config.draft_vocab_size is not None:
            self.reduce_vocabulary(config.draft_vocab_size, target.vocab_size)
        shape = BlockShape.like(target, config.intermediate_size)
        width = shape.hidden_size
        self.fc = nn.Linear(len(target_layer_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps=shape.rms_norm_eps)
        self.rope = RotaryEmbedding(
            target.rope_parameters, head_dim=shape.head_dim, max_position=target.max_position_embeddings
        )
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(std=INITIAL_STD)

    @property
    def decoder_layers(self) -> list[DrafterLayer]:
        """The layers, typed."""
        return cast("list[DrafterLayer]", list(self.layers))

    def initialise_from(self, target_model: nn.Module) -> list[str]:
        """Copy what fits from the target's own layers; return a line for each part that was taken."""
        return initialise_from(self, target_model, first=1 if self.config.init == "fitted" else 0)

    def fit(self, examples: Sequence[tuple[Batch, Features]]) -> list[str]:
        """Fit the first layer by least squares; return a line for each part."""
        return [fit_first_layer(self, examples)]

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weight (0-d fp32) of each loss term, from the batch alone."""
        weights = dict.fromkeys(self.coefficients, objective.total_weight(batch, self.config.slot_weights))
        if self.config.terms.pace is not None:
            weights["draft"] = objective.supervised_blocks(batch, self.config.gamma)
        return weights

    def supervised_rows(self, batch: Batch) -> Rows:
        """Return the slots of ``batch`` that count."""
        return objective.supervised_rows(batch, self.conventions, self.config.slot_weights)

    def context(self, hidden: Tensor) -> Tensor:
        """Map the target's features [..., C*D] to what every layer reads as keys and values, [..., D]."""
        return self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))

    def block_inputs(self, anchors: Tensor) -> Tensor:
        """Embed blocks for anchor tokens [...] as [..., N, D]: the anchor, then masks."""
        mask = torch.full_like(anchors, self.conventions.mask_token_id)
        ids = torch.stack((anchors, *[mask] * (self.conventions.block_size - 1)), dim=-1)
        return self.head.embed(ids).to(self.norm.weight.dtype)

    def block_arguments(self, batch: Batch, hidden: Tensor) -> BlockArguments:
        """Return what the first layer reads, the blocks of all anchors side by side."""
        return self.arguments_around(batch, self.context(hidden))

    def row_inputs(self, batch: Batch) -> Tensor:
        """Embed the rows of all blocks side by side, [B, A*N, D]."""
        return self.block_inputs(batch.input_ids.gather(1, batch.anchor_indices)).flatten(1, 2)

    def arguments_around(self, batch: Batch, context: Tensor) -> BlockArguments:
        """Return what the first layer reads, for a context [B, T, D] that is known already."""
        size, x = self.conventions.block_size, self.row_inputs(batch)
        places = block_positions(batch, size).flatten(1)[:, None]  # [B, 1, A*N]
        return BlockArguments(
            x=x,
            context=context,
            rotation=self.rope(places, x.dtype),
            context_rotation=self.rope(batch.position_ids[:, None], x.dtype),
            mask=block_visible(batch, size, self.conventions.sliding_window, self.attention_backend),
        )

    def block_states(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Run the blocks of all anchors side by side; return final-normed states [B, A, N, D]."""
        arguments = self.block_arguments(batch, hidden)
        for layer in self.layers:
            arguments = arguments._replace(x=layer(*arguments, self.attention_backend))
        return self.norm(arguments.x).unflatten(1, (-1, self.conventions.block_size))

    def start(self, max_length: int) -> DecodingState:
        """Return an empty decoding state for one sequence of at most ``max_length`` positions."""
        return decoding.start(self, max_length)

    def extend(self, state: DecodingState, committed: Committed) -> None:
        """Append the next t committed positions to the state."""
        decoding.extend(self, state, committed.hidden)

    def propose(self, state: DecodingState, anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:
        """Draft ``num_tokens <= gamma`` tokens after ``anchor``, which sits right behind the state's positions."""
        return decoding.propose(self, state, anchor, num_tokens, sampler)

    def token_bias(self, states: Tensor) -> TokenBias | None:  # noqa: ARG002 - for drafters with a sequential head
        """Return what makes the tokens of one block, of ``states`` [k, D], depend on each other; None: they do not."""
        return None

    def confidence_logits(self, states: Tensor, bias: TokenBias | None) -> Tensor | None:  # noqa: ARG002 - subclasses
        """Return the log-odds [k] that each drafted token is accepted, or None."""
        return None
