"""Attention of chains: what it keeps for the backward pass."""

from __future__ import annotations

import torch

from deepspec.nn.chain import ChainMemory, attend_chain


def test_scores_are_not_kept_for_the_backward_pass() -> None:
    """A step's scores are heads x anchors x text floats: at 512 anchors, 4,096 tokens and 32 heads 268 MB each."""
    heads, groups, chains, text, width = 4, 2, 24, 160, 8

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    keys, values = leaf(1, groups, text, width), leaf(1, groups, text, width)
    mask = torch.rand(1, 1, chains, text) > 0.3
    drafted = [(leaf(1, groups, chains, width), leaf(1, groups, chains, width)) for _ in range(3)]
    queries = leaf(1, heads, chains, width)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = attend_chain(queries, ChainMemory(keys, values, mask, drafted), "sdpa")
    assert max(kept, default=0) < 4 * heads * chains * text
    out.square().sum().backward()
    assert queries.grad is not None
    assert all(key.grad is not None and bool(key.grad.abs().sum() > 0) for pair in drafted for key in pair)
