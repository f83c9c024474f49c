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

from deepspec.nn.attention import attend
from deepspec.nn.block import BlockShape, ContextAttention, SwiGLU
from deepspec.nn.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import Batch
    from deepspec.nn.attention import AttentionBackend
    from deepspec.nn.block import Rotation


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
    mask: Tensor  # [B, 1, A, T] what the chains see of the text
    drafted: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # each [B, Hkv, A, Dh]


def attend_chain(queries: Tensor, memory: ChainMemory, backend: AttentionBackend) -> Tensor:
    """Let row a of ``queries`` [B, H, A, Dh] see the text and the drafted rows of chain a; return [B, H, A, Dh].

    ``backend`` is for chains without a drafted row; with them no kernel has the pattern, so it is written out.
    """
    if not memory.drafted:
        return attend(queries, memory.keys, memory.values, memory.mask, backend=backend)
    batch, heads, chains, width = queries.shape
    groups = memory.keys.shape[1]
    queries = (queries * width**-0.5).view(
        batch, groups, heads // groups, chains, width
    )  # fp16 products could overflow
    of_text = (queries @ memory.keys[:, :, None].transpose(-1, -2)).float()  # [B, Hkv, G, A, T]
    of_text = of_text.masked_fill(~memory.mask[:, :, None], torch.finfo(of_text.dtype).min)
    own_keys, own_values = (torch.stack(parts, dim=3)[:, :, None] for parts in zip(*memory.drafted, strict=True))
    of_own = (queries[..., None, :].float() * own_keys.float()).sum(-1)  # [B, Hkv, G, A, steps]
    weights = torch.cat((of_text, of_own), dim=-1).softmax(-1).to(queries.dtype)
    text, own = weights.split((of_text.shape[-1], of_own.shape[-1]), dim=-1)
    out = text @ memory.values[:, :, None] + (own[..., None] * own_values).sum(-2)
    return out.reshape(batch, heads, chains, width)


def chain_mask(batch: Batch, window: int | None, rows: Tensor, ahead: int) -> Tensor:
    """Return [B, 1, n, T], True where a query sees a row of the text.

    The query stands ``ahead`` positions behind the row of the text that ``rows`` [B, n] names, and sees the rows of
    that row's document up to it; with a sliding window w only those less than w positions before itself.
    """
    index = torch.arange(batch.segment_ids.shape[1], device=rows.device)
    segment = batch.segment_ids.gather(1, rows)[..., None]
    seen = (batch.segment_ids[:, None] == segment) & (segment > 0) & (index <= rows[..., None])  # [B, n, T]
    if window is not None:
        position = batch.position_ids.gather(1, rows)[..., None] + ahead
        seen = seen & (batch.position_ids[:, None] > position - window)
    return seen[:, None]


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows [B, n] of ``x`` [B, T, D]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def pick_rotation(rotation: Rotation, rows: Tensor) -> Rotation:
    """Return rows [B, n] of cosines and sines [B, 1, T, Dr]."""
    cos, sin = (pick_rows(part[:, 0], rows)[:, None] for part in rotation)
    return cos, sin
