"""Attention back ends and block masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepspec.contracts import Batch
from deepspec.nn.attention import attend
from deepspec.nn.masks import block_mask, block_pieces
from deepspec.nn.spans import Pieces, Span, neighbours

BACKENDS = ["sdpa", "eager"]


def _inputs(heads: int = 4, groups: int = 2) -> list[torch.Tensor]:
    shapes = [(2, heads, 5, 8), (2, groups, 7, 8), (2, groups, 7, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend: str, groups: int) -> None:
    q, k, v = _inputs(groups=groups)
    mask = torch.rand(2, 1, 5, 7) > 0.4
    mask[..., 0] = True
    wide_k, wide_v = (x.repeat_interleave(4 // groups, dim=1) for x in (k, v))
    scores = (q @ wide_k.transpose(-1, -2)) / 8**0.5
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ wide_v
    out = attend(q, k, v, mask, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(backend: str) -> None:
    q, k, v = _inputs()
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[0, :, 2] = False
    mask[1] = False
    out = attend(q, k, v, mask, backend=backend)  # type: ignore[arg-type]
    assert not out[0, :, 2].any() and not out[1].any() and bool(out[0, :, 1].all())
    out.square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and bool(torch.isfinite(x.grad).all()) and not x.grad[1].any()


def _batch() -> Batch:
    return Batch(
        input_ids=torch.zeros(1, 8, dtype=torch.long),
        segment_ids=torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0]]),
        position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]]),
        loss_mask=torch.ones(1, 8, dtype=torch.bool),
        anchor_indices=torch.tensor([[3, 5, 0]]),
        anchor_mask=torch.tensor([[True, True, False]]),
    )


def test_block_mask_by_hand() -> None:
    mask = block_mask(_batch(), 2)[0, 0].int().tolist()
    first, second, padding = [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0], [0] * 14
    assert mask == [
        [*first, 1, 1, 0, 0, 0, 0],
        [*first, 1, 1, 0, 0, 0, 0],
        [*second, 0, 0, 1, 1, 0, 0],
        [*second, 0, 0, 1, 1, 0, 0],
        padding,
        padding,
    ]


def test_sliding_window_moves_with_the_slot() -> None:
    """w = 3: the slot at position 3 sees positions 1 and 2, the one at position 4 sees position 2; both their block."""
    mask = block_mask(replace(_batch(), anchor_mask=torch.tensor([[True, False, False]])), 2, 3)[0, 0, :2]
    assert mask[:, :4].int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 0]]
    assert mask[:, 8:10].all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_short_and_a_long_row_are_finite(backend: str) -> None:
    """The padding of a 5-token row beside a 300-token row is attended by nobody, and harms nobody."""
    lengths = torch.tensor([5, 300])
    inside = torch.arange(300) < lengths[:, None]
    batch = Batch(
        input_ids=torch.zeros(2, 300, dtype=torch.long),
        segment_ids=inside.long(),
        position_ids=torch.arange(300).expand(2, -1),
        loss_mask=inside,
        anchor_indices=torch.tensor([[0, 0], [0, 299]]),
        anchor_mask=torch.tensor([[True, False], [True, True]]),
    )
    mask = block_mask(batch, 3)
    q, k = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 306, 8)
    out = attend(q, k, k, mask, backend=backend)  # type: ignore[arg-type]
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, attend(q, k, k, mask, backend="eager"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 2])
def test_piece_by_piece_equals_one_mask(backend: str, window: int | None) -> None:
    """A document without an anchor, padding between the anchors of documents, and a row without a document."""
    segments = torch.tensor([[1] * 5 + [2] * 3 + [3] * 4 + [0] * 2, [1] * 4 + [2] * 6 + [0] * 4, [0] * 14])
    positions = torch.tensor([[*range(5), *range(3), *range(4), 0, 0], [*range(4), *range(6)] + [0] * 4, [0] * 14])
    batch = Batch(
        input_ids=torch.zeros_like(segments),
        segment_ids=segments,
        position_ids=positions,
        loss_mask=segments > 0,
        anchor_indices=torch.tensor([[2, 4, 9, 10, 0], [1, 2, 5, 8, 0], [0] * 5]),
        anchor_mask=torch.tensor([[True, True, True, True, False], [True, False, True, True, False], [False] * 5]),
    )
    pieces = block_pieces(batch, 3, window)
    assert isinstance(pieces, Pieces)
    assert len(pieces.pieces) == 4
    q, k, v = torch.randn(3, 4, 15, 8), torch.randn(3, 2, 29, 8), torch.randn(3, 2, 29, 6)
    gradients = []
    for mask in (pieces, block_mask(batch, 3, window)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(inputs[0], inputs[1], inputs[2], mask, backend=backend)  # type: ignore[arg-type]
        out.square().sum().backward()
        gradients.append([out.detach(), *[x.grad for x in inputs]])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_anchors_that_do_not_lie_side_by_side_take_one_mask() -> None:
    batch = replace(_batch(), anchor_indices=torch.tensor([[3, 5, 2]]), anchor_mask=torch.ones(1, 3, dtype=torch.bool))
    assert isinstance(block_pieces(batch, 2), torch.Tensor)


def test_neighbouring_documents_are_joined_up_to_a_number_of_tokens() -> None:
    spans = [Span(0, 0, 5), Span(0, 5, 9), Span(0, 9, 12), Span(1, 0, 30), Span(1, 30, 31), Span(2, 0, 4)]
    assert neighbours(spans, 9) == [Span(0, 0, 9), Span(0, 9, 12), Span(1, 0, 30), Span(1, 30, 31), Span(2, 0, 4)]
