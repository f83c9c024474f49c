"""The decoder layer of autoregressive drafters, and attention over rows that are drafted one after the other.

A drafter that works token by token is trained along its own chain: row t of a text is followed by rows that stand for
the tokens it drafts. A drafted row sees the true rows of the text up to t and the drafted rows of its own chain,
nothing of other chains (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspec.nn.attention import attend
from deepspec.nn.block import BlockShape, ContextAttention, SwiGLU
from deepspec.nn.masks import text_visibility
from deepspec.nn.norm import RMSNorm
from deepspec.nn.spans import Piece, Pieces, separable

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch
    from deepspec.nn.attention import AttentionBackend, Visible
    from deepspec.nn.block import Rotation
    from deepspec.nn.masks import Visibility


class ChainLayer(nn.Module):
    """Pre-norm attention over a chain, then a pre-norm MLP, each with its residual.

    A ``wide`` layer reads token embeddings beside the states, and norms both.
    """

    def __init__(self, shape: BlockShape, *, wide: bool = False, head_norms: bool = True) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps) if wide else None
        self.self_attn = ContextAttention(shape, input_width=2 * width if wide else None, head_norms=head_norms)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = SwiGLU(width, shape.intermediate_size)

    def normed(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return what attention reads of ``states`` [..., D], and of ``embeddings`` [..., D] in a wide layer."""
        if self.hidden_norm is None:
            return self.input_layernorm(states)
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), dim=-1)

    def finish(self, states: Tensor, heads: Tensor) -> Tensor:
        """Add to ``states`` [B, n, D] what ``heads`` [B, H, n, Dh] bring, then the MLP's output."""
        states = states + self.self_attn.o_proj(heads.transpose(1, 2).flatten(2))
        return states + self.mlp(self.post_attention_layernorm(states))


@dataclass
class ChainMemory:
    """Keys and values of one layer: those of the text, and those of each drafted step of A chains."""

    keys: Tensor  # [B, Hkv, T, Dh]
    values: Tensor
    mask: Tensor | Pieces  # [B, 1, A, T] what the chains see of the text
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # each [B, Hkv, A, Dh]

    def of(self, piece: Piece) -> ChainMemory:
        """Return the memory of a piece's chains."""
        chains = (slice(piece.row, piece.row + 1), slice(None), piece.queries)
        drafted = [(keys[chains], values[chains]) for keys, values in self.drafted]
        return ChainMemory(piece.of(self.keys), piece.of(self.values), piece.mask, drafted)


def attend_chain(queries: Tensor, memory: ChainMemory, backend: AttentionBackend) -> Tensor:
    """Let row a of ``queries`` [B, H, A, Dh] see the text and the drafted rows of chain a; return [B, H, A, Dh].

    ``backend`` is for chains without a drafted row; with them no kernel has the pattern, so it is written out.
    """
    mask = memory.mask
    if isinstance(mask, Pieces):
        return mask.join(queries, queries.shape[-1], lambda piece, own: attend_chain(own, memory.of(piece), backend))
    if not memory.drafted:
        return attend(queries, memory.keys, memory.values, mask, backend=backend)
    own_keys, own_values = (torch.stack(parts, dim=3) for parts in zip(*memory.drafted, strict=True))
    arguments = (queries, memory.keys, memory.values, mask, own_keys, own_values)
    return checkpoint(_written_out, *arguments, use_reentrant=False, preserve_rng_state=False)


def _written_out(
    queries: Tensor,  # [B, H, A, Dh]
    keys: Tensor,  # [B, Hkv, T, Dh] of the text
    values: Tensor,
    mask: Tensor,  # [B, 1, A, T]
    own_keys: Tensor,  # [B, Hkv, A, steps, Dh] of the chains
    own_values: Tensor,
) -> Tensor:
    """Return [B, H, A, Dh]. Run again in the backward pass: its scores would take H*A*T floats a step until then."""
    batch, heads, chains, width = queries.shape
    groups = keys.shape[1]
    queries = queries * width**-0.5  # before the products, which could overflow in fp16
    queries = queries.view(batch, groups, heads // groups, chains, width)
    of_text = (queries @ keys[:, :, None].transpose(-1, -2)).float()  # [B, Hkv, G, A, T]
    of_text = of_text.masked_fill(~mask[:, :, None], torch.finfo(of_text.dtype).min)
    own_keys, own_values = own_keys[:, :, None], own_values[:, :, None]
    of_own = (queries[..., None, :].float() * own_keys.float()).sum(-1)  # [B, Hkv, G, A, steps]
    weights = torch.cat((of_text, of_own), dim=-1).softmax(-1).to(queries.dtype)
    text, own = weights.split((of_text.shape[-1], of_own.shape[-1]), dim=-1)
    out = text @ values[:, :, None] + (own[..., None] * own_values).sum(-2)
    return out.reshape(batch, heads, chains, width)


def chain_visibility(batch: Batch, window: int | None, rows: Tensor, ahead: int) -> Visibility:
    """Return what queries see that stand ``ahead`` positions behind the rows of the text that ``rows`` [B, n] names.

    They see the rows of that row's document up to it; with a sliding window w only those less than w positions before
    themselves.
    """
    return text_visibility(batch, rows, rows + 1, batch.position_ids.gather(1, rows) + ahead, window)


def text_visible(batch: Batch, window: int | None, backend: AttentionBackend) -> Visible:
    """Return what every row of the text sees of it, for ``backend``; document by document where rows are packed and no
    kernel would skip the rest."""
    found = separable(batch)
    if found is None or backend == "flex":
        every = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device).expand_as(batch.input_ids)
        return chain_visibility(batch, window, every, 0).for_kernel(backend)
    pieces = []
    for one in found:
        mask = chain_visibility(one.batch, window, one.batch.position_ids, 0).dense()
        pieces.append(Piece(one.span.row, one.place, (one.place,), mask))
    return Pieces(pieces)


def chains_visible(batch: Batch, window: int | None, ahead: int) -> Tensor | Pieces:
    """Return what the chains of all anchors see of the text, ``ahead`` positions behind their first row.

    The first row of the chain at anchor a is row a - 1 of the text. No kernel has the pattern of later steps, so this
    is a mask whatever the back end.
    """
    found = separable(batch)
    if found is None:
        return chain_visibility(batch, window, (batch.anchor_indices - 1).clamp(min=0), ahead).dense()
    pieces = []
    for one in found:
        mask = chain_visibility(one.batch, window, one.batch.anchor_indices - 1, ahead).dense()
        pieces.append(Piece(one.span.row, one.anchors, (one.place,), mask))
    return Pieces(pieces)


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [B, n] of ``x`` [B, T, D]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def pick_rotation(rotation: Rotation, rows: Tensor) -> Rotation:
    """Return rows [B, n] of cosines and sines [B, 1, T, Dr]."""
    cos, sin = (pick_rows(part[:, 0], rows)[:, None] for part in rotation)
    return cos, sin
