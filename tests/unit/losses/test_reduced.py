"""The fused loss with a reduced draft vocabulary, against whole logits and autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspec.losses.fused import BlockLoss, block_loss
from deepspec.nn.vocabulary import DraftVocabulary
from tests.unit.losses.test_fused import HEADS, VOCAB, Case, make, same

KEPT = 20


def reduced(head: str = "plain", ids: torch.Tensor | None = None, **over: Any) -> Case:
    """Return a case whose draft proposes ``ids``, by default 20 random tokens: many labels lie outside."""
    case = make(head, **over)
    if ids is None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))[:KEPT].sort().values
    w2 = None if case.w2 is None else case.w2.detach()[ids].clone().requires_grad_()
    return replace(case, w2=w2, task=replace(case.task, vocabulary=DraftVocabulary.of(case.task.head, ids)))


def obvious(case: Case) -> tuple[BlockLoss, list[torch.Tensor]]:
    """The definition: q is 0 outside, and a label outside has no cross-entropy."""
    task, vocabulary = case.task, case.task.vocabulary
    assert vocabulary is not None
    z = task.head.logits(case.hidden)[:, vocabulary.ids]
    if case.markov is not None and case.w2 is not None:
        z = z + case.markov @ case.w2.t()
    p = task.head.logits(task.target_hidden)[task.target_index].softmax(-1)
    q = torch.zeros_like(p).index_copy(1, vocabulary.ids, z.softmax(-1))
    l1 = (q - p).abs().sum(-1)
    inside = (task.labels[:, None] == vocabulary.ids).any(-1)
    chance = q.gather(1, task.labels[:, None]).squeeze(1)
    ce = torch.where(inside, -torch.where(inside, chance, 1.0).log(), 0.0)
    assert inside.any()
    assert not inside.all()
    soft = torch.zeros_like(ce)
    inside_p = p[:, vocabulary.ids]
    if task.uses_soft:
        soft = -(inside_p * z.log_softmax(-1)).sum(-1)
    accepted = 1.0 - 0.5 * l1
    share = torch.exp(-task.eta * accepted).detach()
    mixed = share * (soft - torch.special.entr(inside_p).sum(-1)) + (1.0 - share) * 0.5 * l1
    value = task.ce * ce + task.soft * soft + task.l1 * l1 - task.lk * accepted.log() + task.mix * mixed
    reverse, jsd = torch.zeros_like(ce), torch.zeros_like(ce)
    if task.uses_ratio:
        inside_q, m = z.softmax(-1), 0.5 * (p + q)
        reverse = (inside_q * (inside_q / inside_p).log()).sum(-1)
        of_q = inside_q * (inside_q / m[:, vocabulary.ids]).log()
        jsd = 0.5 * ((p * (p / m).log()).sum(-1) + of_q.sum(-1))  # p over all V: log 2 where q is 0
        value = value + task.reverse * reverse + task.jsd * jsd
        reverse, jsd = reverse * bool(task.reverse), jsd * bool(task.jsd)
    total = (task.weights * value).sum()
    inputs = [x for x in (case.hidden, case.markov, case.w2) if x is not None]
    agreement = (q.argmax(-1) == p.argmax(-1)).to(ce.dtype)
    loss = BlockLoss(total, ce, soft, l1, agreement, reverse, jsd)
    return loss, list(torch.autograd.grad(1.7 * total, inputs))


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("head", list(HEADS))
def test_value_and_gradient_in_fp64(head: str, markov: bool, mode: str) -> None:
    case = reduced(head, markov=markov)
    want = obvious(case)
    assert 0 < want[0].agreement.sum() < len(want[0].agreement)
    same(case.run(mode=mode), want, 1e-12)


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("head", list(HEADS))
def test_known_sums_change_nothing(head: str, mode: Any) -> None:
    case = reduced(head)
    logits = case.task.head.logits(case.task.target_hidden)
    known: dict[str, Any] = {"target_log_sum": logits.logsumexp(-1), "target_top": logits.argmax(-1)}
    case.task = replace(case.task, soft=0.3, lk=0.2, mix=0.4, reverse=0.5, jsd=0.6)
    assert not replace(case.task, **known).needs_whole_rows
    same(case.run(mode=mode, **known), obvious(case), 1e-11)


def test_the_soft_cross_entropy() -> None:
    case = reduced("all")
    case.task = replace(case.task, soft=0.7)
    same(case.run(chunk_rows=7), obvious(case), 1e-12)


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("terms", [{"reverse": 0.6}, {"jsd": 0.7}, {"reverse": 0.3, "jsd": 0.4}])
def test_the_other_divergences(terms: dict[str, float], mode: Any) -> None:
    case = reduced("all")
    case.task = replace(case.task, mode=mode, **terms)  # type: ignore[arg-type]
    same(case.run(chunk_rows=7), obvious(case), 1e-11)


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_the_size_of_a_chunk_changes_nothing(chunk_rows: int) -> None:
    case = reduced("all")
    same(case.run(chunk_rows=chunk_rows), obvious(case), 1e-12)


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_vocabulary_gives_the_same_numbers(dtype: torch.dtype, mode: str) -> None:
    whole, all_ids = make("all", dtype=dtype), reduced("all", torch.arange(VOCAB), dtype=dtype)
    (loss, gradients), (expected, others) = all_ids.run(mode=mode), whole.run(mode=mode)
    assert all(a.equal(b) for a, b in zip(loss, expected, strict=True))
    assert all(a.equal(b) for a, b in zip(gradients, others, strict=True))


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    case = reduced()
    vocabulary = case.task.vocabulary
    assert vocabulary is not None
    loss = block_loss(case.hidden, case.task, case.markov, case.w2)
    z = vocabulary.head.logits(case.hidden) + case.markov @ case.w2.t()  # type: ignore[operator, union-attr]
    p = case.task.head.logits(case.task.target_hidden)[case.task.target_index].softmax(-1)
    torch.testing.assert_close(loss.acceptance, torch.minimum(vocabulary.spread(z.softmax(-1)), p).sum(-1))
