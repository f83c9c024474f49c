"""Attention behind one call, whatever kernel runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional

from deepspec.nn.flex import BlockMask, attend_tiled
from deepspec.nn.spans import Pieces

if TYPE_CHECKING:
    from torch import Tensor

AttentionBackend = Literal["auto", "flex", "sdpa", "eager"]
"""flex and sdpa are kernels of torch, eager is the definition; auto is flex for training on CUDA, else sdpa."""
Visible = torch.Tensor | Pieces | BlockMask
"""What may be seen, as a kernel takes it: a mask [B, 1, n, s] (True may), document by document, or by tiles (flex)."""


def attend(
    q: Tensor,  # [B, H, n, Dh]
    k: Tensor,  # [B, Hkv, s, Dh], H a multiple of Hkv
    v: Tensor,  # [B, Hkv, s, Dh]
    mask: Visible | None = None,  # [B, 1, n, s]; None: everything may be seen
    *,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Return softmax(q k^T / sqrt(Dh)) v as [B, H, n, Dh]. A query that may see nothing gives zeros (no gradient).

    Kernels that take a dense mask disagree about such a query (zeros, a mean, NaN), so it is given everything to see
    and its result dropped. ``backend`` chooses among them; tiles have a kernel of their own.
    """
    if isinstance(mask, BlockMask):
        return attend_tiled(q, k, v, mask)
    if isinstance(mask, Pieces):
        return mask.join(
            q, v.shape[-1], lambda piece, own: attend(own, piece.of(k), piece.of(v), piece.mask, backend=backend)
        )
    blind = None
    if mask is not None:
        blind = ~mask.any(-1, keepdim=True)  # [B, 1, n, 1]
        mask = mask | blind
    out = (_eager if backend == "eager" else _sdpa)(q, k, v, mask)
    return out if blind is None else out.masked_fill(blind, 0.0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The definition, with the heads of one group side by side instead of repeated keys."""
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    q = q.view(batch, groups, heads // groups, length, width)
    scores = ((q * width**-0.5) @ k[:, :, None].transpose(-1, -2)).float()  # [B, Hkv, H/Hkv, n, s]; no fp16 overflow
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ v[:, :, None]).reshape(batch, heads, length, v.shape[-1])
