"""FlexAttention: one kernel that skips the tiles of a mask in which nothing is seen, and takes grouped heads.

It is what attention runs on CUDA. On a CPU it has no backward pass (torch 2.13), so there only tests call it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

if TYPE_CHECKING:
    from torch import Tensor

Rule = Callable[["Tensor", "Tensor", "Tensor", "Tensor"], "Tensor"]
"""Of a row, a head, a query and a key, by number: may the query see the key?"""


def tiled(rule: Rule, rows: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    """Return which tiles of [rows, 1, queries, keys] the kernel has to look at, and ``rule`` for those seen in part.

    Compiled where the kernel is: written out, the rule takes ``queries`` x ``keys`` numbers a row.
    """
    make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(rule, rows, None, queries, keys, device=device)


def attend_tiled(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Return softmax(q k^T / sqrt(Dh)) v as [B, H, n, Dh], zeros for a query that sees nothing."""
    return _compiled(flex_attention)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled for every shape at once: T and A change from batch to batch."""
    return torch.compile(function, dynamic=True)
