"""The decoder layer of a block drafter: the target's features enter every layer as keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from deepspec.nn.attention import attend
from deepspec.nn.norm import RMSNorm
from deepspec.nn.rope import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.nn.attention import AttentionBackend, Visible

Rotation = tuple["Tensor", "Tensor"]  # (cos, sin), broadcastable to [B, heads, n, Dr]


@dataclass(frozen=True)
class BlockShape:
    """Widths of a drafter layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    @classmethod
    def like(cls, target: TargetInfo, intermediate_size: int | None = None) -> BlockShape:
        """Return the target's own widths, but for those of the MLP where they are given."""
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or target.intermediate_size,
            num_heads=target.num_attention_heads,
            num_kv_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
        )


class ContextAttention(nn.Module):
    """Grouped attention of block slots over ``[context ; block]``, with RMSNorm on the heads of queries and keys.

    ``input_width`` is that of the states it reads, where it is not the layer's own; without ``head_norms`` queries and
    keys stay as they are.
    """

    def __init__(self, shape: BlockShape, *, input_width: int | None = None, head_norms: bool = True) -> None:
        super().__init__()
        width, head_dim = input_width or shape.hidden_size, shape.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, shape.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head_dim, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (_head_norm(shape, wanted=head_norms) for _ in range(2))

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Map ``x`` [B, n, D] (normed context features or normed block states) to keys and values [B, Hkv, n, Dh]."""
        heads = (x.shape[0], x.shape[1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        return rotate(keys, *rotation), self.v_proj(x).view(heads).transpose(1, 2)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Map block states ``x`` [B, n, D] to queries [B, H, n, Dh]."""
        heads = (x.shape[0], x.shape[1], -1, self.head_dim)
        return rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), *rotation)

    def forward(
        self,
        x: Tensor,  # [B, n, D]
        context: Tensor,  # [B, T, D]
        rotation: Rotation,  # of the block's slots
        context_rotation: Rotation,
        mask: Visible | None,  # [B, 1, n, T + n]
        backend: AttentionBackend,
    ) -> Tensor:
        """Return the attention's output [B, n, D]."""
        return self.o_proj(self.mix(x, context, rotation, context_rotation, mask, backend))

    def mix(
        self,
        x: Tensor,
        context: Tensor,
        rotation: Rotation,
        context_rotation: Rotation,
        mask: Visible | None,
        backend: AttentionBackend,
    ) -> Tensor:
        """Return what the heads bring, [B, n, H*Dh]."""
        joint = torch.cat((context, x), dim=1)
        both = (
            torch.cat((context_rotation[0], rotation[0]), dim=-2),
            torch.cat((context_rotation[1], rotation[1]), dim=-2),
        )
        keys, values = self.keys_values(joint, both)
        return _joined(attend(self.queries(x, rotation), keys, values, mask, backend=backend))

    def output(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Visible | None, backend: AttentionBackend
    ) -> Tensor:
        """Attend and project back to [B, n, D]."""
        return self.o_proj(_joined(attend(queries, keys, values, mask, backend=backend)))


def _head_norm(shape: BlockShape, *, wanted: bool) -> RMSNorm:
    """Return the norm of heads, or in its place what leaves them as they are."""
    return RMSNorm(shape.head_dim, eps=shape.rms_norm_eps) if wanted else cast("RMSNorm", nn.Identity())


def _joined(heads: Tensor) -> Tensor:
    """Map heads [B, H, n, Dh] to [B, n, H*Dh]."""
    return heads.transpose(1, 2).flatten(2)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., D] to [..., D]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm attention over context and block, then a pre-norm MLP, each with its residual."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = ContextAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = SwiGLU(shape.hidden_size, shape.intermediate_size)

    def forward(
        self,
        x: Tensor,  # [B, n, D]
        context: Tensor,  # [B, T, D]
        rotation: Rotation,
        context_rotation: Rotation,
        mask: Visible | None,
        backend: AttentionBackend,
    ) -> Tensor:
        """Return the next states [B, n, D]. ``context`` is normed already and goes to the projections as it is."""
        x = x + self.self_attn(self.input_layernorm(x), context, rotation, context_rotation, mask, backend)
        return x + self.mlp(self.post_attention_layernorm(x))
