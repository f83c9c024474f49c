"""Which keys a query may see, written once and given to each kernel in the form that it takes.

The keys of a training block's queries are the T context positions of a row followed by the A*K slots of its blocks; the
queries are those slots. Chains (nn/chain.py) have queries and keys of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.nn import flex
from deepspec.nn.spans import Piece, Pieces, separable

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch
    from deepspec.nn.attention import AttentionBackend, Visible

_NO_BLOCK, _OF_NO_BLOCK = -1, -2  # of a key that belongs to no block; of a query that does: they never meet


@dataclass(frozen=True)
class Visibility:
    """What n queries see of s keys: those of their own document before ``stop`` that are not too far back, and their
    own block.

    Per query and per key, never per pair: a kernel asks for the pairs it needs.
    """

    segment: Tensor  # [B, n] document of a query
    stop: Tensor  # [B, n] number of the first key of the text that it does not see; 0: it sees no text
    first: Tensor | None  # [B, n] first position of its document that it sees; None: position 0
    block: Tensor  # [B, n] number of its block
    key_segment: Tensor  # [B, s]
    key_position: Tensor  # [B, s]
    key_block: Tensor  # [B, s]

    def rule(self) -> flex.Rule:
        """Return the same as a function of row, head, query and key, numbers that broadcast."""
        segment, stop, first, block = self.segment, self.stop, self.first, self.block
        key_segment, key_position, key_block = self.key_segment, self.key_position, self.key_block

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - heads see alike
            text = (key_segment[row, key] == segment[row, query]) & (key < stop[row, query])
            if first is not None:
                text = text & (key_position[row, key] >= first[row, query])
            return text | (key_block[row, key] == block[row, query])

        return sees  # a closure over tensors alone: what FlexAttention can compile once for all batches

    def dense(self) -> Tensor:
        """Return the mask [B, 1, n, s]."""
        rows, queries, keys = (torch.arange(n, device=self.segment.device) for n in self._sizes())
        return self.rule()(rows[:, None, None], rows, queries[:, None], keys)[:, None]

    def tiled(self) -> flex.BlockMask:
        """Return the same for FlexAttention."""
        return flex.tiled(self.rule(), *self._sizes(), self.segment.device)

    def for_kernel(self, backend: AttentionBackend) -> Tensor | flex.BlockMask:
        """Return what ``backend`` takes."""
        if backend == "auto":
            backend = "flex" if self.segment.device.type == "cuda" else "sdpa"
        return self.tiled() if backend == "flex" else self.dense()

    def _sizes(self) -> tuple[int, int, int]:
        return (*self.segment.shape, self.key_segment.shape[1])


def text_visibility(batch: Batch, rows: Tensor, stop: Tensor, position: Tensor, window: int | None) -> Visibility:
    """Return what queries see of the text [B, T] alone.

    Query i belongs to the document of row ``rows`` [B, n], sees its rows before ``stop`` [B, n], and stands at
    ``position`` [B, n]: with a sliding window w it sees those less than w positions before itself.
    """
    segment = batch.segment_ids.gather(1, rows)
    return Visibility(
        segment=segment,
        stop=torch.where(segment > 0, stop, 0),
        first=None if window is None else position - (window - 1),
        block=torch.full_like(segment, _OF_NO_BLOCK),
        key_segment=batch.segment_ids,
        key_position=batch.position_ids,
        key_block=torch.full_like(batch.segment_ids, _NO_BLOCK),
    )


def block_visibility(batch: Batch, block_size: int, sliding_window: int | None = None) -> Visibility:
    """Return what the slots of all blocks see.

    Slot j of the anchor at position a sees the context of its own document at positions < a, with a sliding window w
    only those >= a+j-(w-1), and the whole of its own block. Slots of padding anchors see nothing.
    """
    per_slot = [x.repeat_interleave(block_size, dim=1) for x in (batch.anchor_indices, batch.anchor_mask)]
    place, real = per_slot[0], per_slot[1]
    slots = torch.arange(place.shape[1], device=place.device).expand_as(place)
    own = slots // block_size
    text = text_visibility(batch, place, place, block_positions(batch, block_size).flatten(1), sliding_window)
    return Visibility(
        segment=text.segment,
        stop=torch.where(real, text.stop, 0),
        first=text.first,
        block=torch.where(real, own, _OF_NO_BLOCK),
        key_segment=torch.cat((batch.segment_ids, torch.zeros_like(own)), dim=1),
        key_position=torch.cat((batch.position_ids, torch.zeros_like(own)), dim=1),
        key_block=torch.cat((text.key_block, own), dim=1),
    )


def block_mask(batch: Batch, block_size: int, sliding_window: int | None = None) -> Tensor:
    """Return the mask [B, 1, A*K, T + A*K], True where a slot may look."""
    return block_visibility(batch, block_size, sliding_window).dense()


def block_visible(
    batch: Batch, block_size: int, sliding_window: int | None = None, backend: AttentionBackend = "auto"
) -> Visible:
    """Return what ``block_mask`` says for ``backend``: document by document where no kernel would skip the rest."""
    found = separable(batch)
    if found is None or backend == "flex":
        return block_visibility(batch, block_size, sliding_window).for_kernel(backend)
    width, pieces = batch.input_ids.shape[1], []
    for one in found:
        slots = slice(one.anchors.start * block_size, one.anchors.stop * block_size)
        keys = (one.place, slice(width + slots.start, width + slots.stop))
        pieces.append(Piece(one.span.row, slots, keys, block_mask(one.batch, block_size, sliding_window)))
    return Pieces(pieces)


def block_positions(batch: Batch, block_size: int) -> Tensor:
    """Return the position [B, A, K] of every slot inside its document."""
    start = batch.position_ids.gather(1, batch.anchor_indices)
    return start[..., None] + torch.arange(block_size, device=start.device)
