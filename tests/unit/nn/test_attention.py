"""Attention back ends and block masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_mask

from deepspec.contracts import Batch
from deepspec.nn import flex
from deepspec.nn.attention import attend
from deepspec.nn.chain import chain_visibility
from deepspec.nn.masks import Visibility, block_mask, block_visibility, block_visible
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
    batch = _packed_batch()
    pieces = block_visible(batch, 3, window)
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


def _packed_batch() -> Batch:
    """Return a document without an anchor, padding between the anchors of documents, and a row without a document."""
    segments = torch.tensor([[1] * 5 + [2] * 3 + [3] * 4 + [0] * 2, [1] * 4 + [2] * 6 + [0] * 4, [0] * 14])
    positions = torch.tensor([[*range(5), *range(3), *range(4), 0, 0], [*range(4), *range(6)] + [0] * 4, [0] * 14])
    return Batch(
        input_ids=torch.zeros_like(segments),
        segment_ids=segments,
        position_ids=positions,
        loss_mask=segments > 0,
        anchor_indices=torch.tensor([[2, 4, 9, 10, 0], [1, 2, 5, 8, 0], [0] * 5]),
        anchor_mask=torch.tensor([[True, True, True, True, False], [True, False, True, True, False], [False] * 5]),
    )


def _visibilities(window: int | None, device: str = "cpu") -> list[Visibility]:
    batch = _packed_batch().to(device)
    every = torch.arange(14, device=device).expand(3, -1)
    return [block_visibility(batch, 3, window), chain_visibility(batch, window, every, 0)]


@pytest.mark.parametrize("window", [None, 2])
def test_flex_sees_what_the_dense_mask_shows(window: int | None) -> None:
    for visibility in _visibilities(window):
        rows, queries, keys = (*visibility.segment.shape, visibility.key_segment.shape[1])
        by_pair = create_mask(visibility.rule(), rows, 1, queries, keys, device="cpu")
        assert torch.equal(by_pair, visibility.dense())
        assert bool(by_pair.any()) and not bool(by_pair.all())
        assert isinstance(visibility.for_kernel("flex"), flex.BlockMask)


def test_the_kernel_follows_the_device() -> None:
    visibility = _visibilities(None)[0]
    assert isinstance(visibility.for_kernel("auto"), torch.Tensor)
    assert isinstance(visibility.for_kernel("eager"), torch.Tensor)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 2])
def test_flex_gives_the_same_on_a_cpu(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its definition and value alone: there it has no backward pass. Queries that see nothing, grouped heads."""
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    for visibility in _visibilities(window):
        q, k, v = (x.detach() for x in _heads(visibility, "cpu"))
        expected = attend(q, k, v, visibility.for_kernel("eager"), backend="eager")
        torch.testing.assert_close(attend(q, k, v, visibility.for_kernel("flex")), expected, rtol=1e-5, atol=1e-5)
        assert not bool(visibility.dense().any(-1).all())


def test_flex_is_compiled_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    compiled = torch.compile(flex.flex_attention, backend=counter, dynamic=True)
    monkeypatch.setattr(flex, "_compiled", lambda _function: compiled)
    torch._dynamo.reset()
    for length, anchors in ((740, 40), (512, 24), (300, 8)):
        visibility = block_visibility(_long_batch(length, anchors), 7, 200)
        q, k, v = (x.detach() for x in _heads(visibility, "cpu"))
        attend(q, k, v, visibility.for_kernel("flex"))
    assert 1 <= counter.frame_count <= 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA alone")
@pytest.mark.parametrize("window", [None, 2, 200])
def test_flex_gives_the_same_value_and_gradients_on_cuda(window: int | None) -> None:
    long = block_visibility(_long_batch().to("cuda"), 7, window)
    for visibility in (*_visibilities(window, "cuda"), long):
        found = _heads(visibility, "cuda"), _heads(visibility, "cuda")
        for backend, heads in zip(("flex", "eager"), found, strict=True):
            out = attend(*heads, visibility.for_kernel(backend), backend=backend)  # type: ignore[arg-type, misc]
            out.square().sum().backward()
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def _long_batch(length: int = 740, anchors: int = 40) -> Batch:
    """Return a row of two documents over several tiles, and padding behind them."""
    first, second = 2 * length // 5, length // 2
    padding = torch.zeros(length - first - second, dtype=torch.long)
    segments = torch.cat((torch.ones(first).long(), torch.full((second,), 2), padding))[None]
    return Batch(
        input_ids=torch.zeros_like(segments),
        segment_ids=segments,
        position_ids=torch.cat((torch.arange(first), torch.arange(second), padding))[None],
        loss_mask=segments > 0,
        anchor_indices=torch.linspace(5, first + second - 9, anchors).long()[None],
        anchor_mask=torch.ones(1, anchors, dtype=torch.bool),
    )


def _heads(visibility: Visibility, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, queries, keys = (*visibility.segment.shape, visibility.key_segment.shape[1])
    shapes = [(rows, 4, queries, 16), (rows, 2, keys, 16), (rows, 2, keys, 16)]
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def test_anchors_that_do_not_lie_side_by_side_take_one_mask() -> None:
    batch = replace(_batch(), anchor_indices=torch.tensor([[3, 5, 2]]), anchor_mask=torch.ones(1, 3, dtype=torch.bool))
    assert isinstance(block_visible(batch, 2), torch.Tensor)


def test_neighbouring_documents_are_joined_up_to_a_number_of_tokens() -> None:
    spans = [Span(0, 0, 5), Span(0, 5, 9), Span(0, 9, 12), Span(1, 0, 30), Span(1, 30, 31), Span(2, 0, 4)]
    assert neighbours(spans, 9) == [Span(0, 0, 9), Span(0, 9, 12), Span(1, 0, 30), Span(1, 30, 31), Span(2, 0, 4)]
