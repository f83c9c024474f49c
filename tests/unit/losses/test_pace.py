"""D-PACE's weights, and the one pass that forms them, against loops and autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspec.losses import rows
from deepspec.losses.chunks import by_block
from deepspec.losses.fused import block_loss
from deepspec.losses.task import Pace
from deepspec.nn.vocabulary import DraftVocabulary
from tests.unit.losses.test_fused import HEADS, POSITIONS, VOCAB, Case, make, same

GAMMA = 4
BLOCKS = [(0, 4), (2, 4), (3, 2), (5, 4), (5, 1), (6, 3), (1, 4)]
"""First target position and slots of each block: they overlap, are cut short, and are not in order."""


def paced(head: str = "plain", smoothing: float = 0.3, **over: Any) -> Case:
    """Return a case whose rows are the slots of BLOCKS."""
    places = [(number, start, slot) for number, (start, length) in enumerate(BLOCKS) for slot in range(length)]
    case = make(head, num_rows=len(places), **over)
    block, start, slot = torch.tensor(places).unbind(1)
    pace = Pace(smoothing, 10 * block, slot, GAMMA)
    assert int((start + slot).max()) < POSITIONS
    target = case.task.target_hidden[start + slot].double()
    near = target + 0.3 * torch.randn(target.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return replace(
        case,
        hidden=near.to(case.hidden.dtype).requires_grad_(),
        task=replace(case.task, target_index=start + slot, pace=pace),
    )


def closed_form(chances: list[float], alpha: float) -> list[float]:
    """w_j = sum_(m >= j) prod_(i <= m) ((1 - alpha) q_i + alpha)."""
    smoothed = [(1.0 - alpha) * q + alpha for q in chances]
    reach = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
    return [sum(reach[j:]) for j in range(len(reach))]


def chances(case: Case) -> Tensor:
    """The draft's probability of each label [R]."""
    task, vocabulary = case.task, case.task.vocabulary
    z = task.draft_head.logits(case.hidden)
    if case.markov is not None and case.w2 is not None:
        z = z + case.markov @ case.w2.t()
    q = z.softmax(-1) if vocabulary is None else vocabulary.spread(z.softmax(-1))
    return q.gather(1, task.labels[:, None]).squeeze(1).detach()


def weights(case: Case) -> Tensor:
    """The closed form, block after block, times the task's own weights."""
    found: list[float] = []
    known, pace = chances(case).tolist(), case.task.pace
    assert pace is not None
    for _, length in BLOCKS:
        found += closed_form(known[len(found) : len(found) + length], pace.smoothing)
    return case.task.weights * torch.tensor(found, dtype=torch.float64)


def obvious(case: Case) -> Any:
    """The plain loss with the closed form as constant weights."""
    return replace(case, task=replace(case.task, weights=weights(case), pace=None)).obvious()


def test_weights_of_a_block() -> None:
    chance = torch.tensor([[0.5, 0.2, 0.8, 0.9], [0.1, 0.3, 0.7, 0.7]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    found = rows.pace_weights(chance, mask, 0.5)
    expected = [closed_form([0.5, 0.2, 0.8, 0.9], 0.5), [*closed_form([0.1, 0.3], 0.5), 0.0, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert found[1, 0].item() == pytest.approx(0.55 + 0.55 * 0.65)


def test_weights_at_the_largest_smoothing_count_the_slots_left() -> None:
    found = rows.pace_weights(torch.rand(1, 4), torch.tensor([[True, True, True, False]]), 1.0)
    assert found.tolist() == [[3.0, 2.0, 1.0, 0.0]]


def test_weights_are_the_gradient_of_the_expected_length() -> None:
    """Of sum_m prod_(i <= m) q_i by log q_j, which is where they come from."""
    log_q = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64).log().requires_grad_()
    (gradient,) = torch.autograd.grad(log_q.exp().cumprod(-1).sum(), log_q)
    found = rows.pace_weights(log_q.exp(), torch.ones(3, dtype=torch.bool), 0.0)
    torch.testing.assert_close(found, gradient)
    assert not found.requires_grad


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("head", list(HEADS))
def test_value_and_gradient_in_fp64(head: str, mode: str) -> None:
    case = paced(head)
    same(case.run(mode=mode, chunk_rows=7), obvious(case), 1e-12)


@pytest.mark.parametrize("chunk_rows", [1, 4, 6, 9, 1000])
def test_the_size_of_a_chunk_changes_nothing(chunk_rows: int) -> None:
    case = paced()
    case.task = replace(case.task, soft=0.3, lk=0.2, mix=0.4, reverse=0.5, jsd=0.6)
    same(case.run(chunk_rows=chunk_rows), obvious(case), 1e-11)


def test_the_order_of_rows_changes_nothing() -> None:
    case = paced()
    task, pace = case.task, case.task.pace
    assert pace is not None and case.markov is not None
    order = torch.randperm(len(task.labels), generator=torch.Generator().manual_seed(1))
    task = replace(
        task,
        target_index=task.target_index[order],
        labels=task.labels[order],
        weights=task.weights[order],
        pace=pace._replace(block=pace.block[order], slot=pace.slot[order]),
    )
    shuffled = replace(case, hidden=case.hidden[order], markov=case.markov[order], task=task)
    (loss, gradients), (other, others) = case.run(chunk_rows=6), shuffled.run(chunk_rows=6)
    torch.testing.assert_close(other.total, loss.total)
    torch.testing.assert_close(others[0], gradients[0][order])
    torch.testing.assert_close(others[2], gradients[2])


def test_value_and_gradient_in_fp32() -> None:
    case = paced("all", dtype=torch.float32)
    wide = case.widened()
    (loss, gradients), (expected, others) = case.run(chunk_rows=6), obvious(wide)
    torch.testing.assert_close(loss.total.double(), expected.total, rtol=1e-5, atol=0.0)
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient.double() - other).norm() <= 1e-4 * other.norm()


def test_a_label_outside_the_draft_vocabulary_has_no_chance() -> None:
    case = paced()
    ids = torch.arange(0, VOCAB, 3)
    assert case.w2 is not None
    case.w2 = case.w2.detach()[ids].clone().requires_grad_()
    case.task = replace(case.task, vocabulary=DraftVocabulary.of(case.task.head, ids))
    plain = replace(case, task=replace(case.task, weights=weights(case), pace=None))
    assert 0 < int((chances(case) == 0.0).sum()) < len(case.task.labels)
    same(case.run(chunk_rows=6), plain.run(), 1e-12)


def test_without_gradient_and_without_rows() -> None:
    case = paced()
    with torch.no_grad():
        loss = block_loss(case.hidden, case.task, case.markov, case.w2)
    torch.testing.assert_close(loss.total, obvious(case)[0].total)
    empty = make(num_rows=0)
    none = torch.zeros(0, dtype=torch.int64)
    total = empty.run(pace=Pace(0.5, none, none, GAMMA))[0].total
    assert total.item() == 0.0


@pytest.mark.parametrize("chunk_rows", [1, 4, 6, 9, 1000])
def test_chunks_hold_whole_blocks_and_each_position_once(chunk_rows: int) -> None:
    task = paced().task
    assert task.pace is not None
    plan = by_block(task.target_index, task.pace.block, POSITIONS, chunk_rows)
    seen: list[int] = []
    assert plan.block is not None
    for chunk in plan.chunks:
        places = plan.order[chunk.rows]
        blocks = set(task.pace.block[places].tolist())
        assert int(torch.isin(task.pace.block, torch.tensor(sorted(blocks))).sum()) == len(places)
        assert len(places) <= chunk_rows or len(blocks) == 1
        positions = plan.positions[chunk.positions].tolist()
        assert positions == sorted(set(task.target_index[places].tolist()))
        assert plan.positions[plan.judge[chunk.rows]].equal(task.target_index[places])
        assert set(plan.block[chunk.rows].tolist()) == set(range(chunk.blocks.start, chunk.blocks.stop))
        seen += places.tolist()
    assert sorted(seen) == list(range(len(task.labels)))
    assert plan.order[plan.inverse].equal(torch.arange(len(task.labels)))
