"""Which keys a query of a training block may see.

The keys are the T context positions of a row followed by the A*K slots of its blocks; the queries are those slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.nn.spans import Piece, Pieces, separable

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch


def block_mask(batch: Batch, block_size: int, sliding_window: int | None = None) -> Tensor:
    """Return the mask [B, 1, A*K, T + A*K], True where a slot may look.

    Slot j of the anchor at position a sees the context of its own document at positions < a, with a sliding window w
    only those >= a+j-(w-1), and the whole of its own block. Slots of padding anchors see nothing.
    """
    batch_rows, anchors = batch.anchor_indices.shape
    slots = anchors * block_size
    context = _context_mask(batch, block_size, sliding_window).reshape(batch_rows, slots, -1)
    own = torch.arange(slots, device=context.device) // block_size  # [A*K], number of the slot's block
    inside = (own[:, None] == own).expand(batch_rows, slots, slots)
    inside = inside & batch.anchor_mask.repeat_interleave(block_size, dim=1)[:, :, None]
    return torch.cat((context, inside), dim=-1)[:, None]


def block_pieces(batch: Batch, block_size: int, sliding_window: int | None = None) -> Tensor | Pieces:
    """Return what ``block_mask`` says, document by document where rows are packed and no kernel would skip the rest."""
    found = separable(batch)
    if found is None:
        return block_mask(batch, block_size, sliding_window)
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


def _context_mask(batch: Batch, block_size: int, sliding_window: int | None) -> Tensor:
    """Return [B, A, K, T]. Documents are contiguous in a row, so "before the anchor" may be asked of the index."""
    index = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)  # [T]
    segment = batch.segment_ids.gather(1, batch.anchor_indices)[..., None]  # [B, A, 1]
    seen = (batch.segment_ids[:, None] == segment) & (index < batch.anchor_indices[..., None])
    seen = (seen & batch.anchor_mask[..., None] & (segment > 0))[:, :, None]  # [B, A, 1, T]
    if sliding_window is None:
        return seen.expand(-1, -1, block_size, -1)
    first = block_positions(batch, block_size) - (sliding_window - 1)  # [B, A, K]
    return seen & (batch.position_ids[:, None, None] >= first[..., None])
