"""The fused loss against the per-row functions, in value and gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspec.losses import rows
from deepspec.losses.fused import BlockLoss, block_loss
from deepspec.losses.task import RowTask
from deepspec.nn.head import FrozenHead

ROWS, WIDTH, VOCAB, RANK, POSITIONS = 23, 16, 61, 4, 9
CE, L1 = 0.1, 0.9
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"logit_scale": 0.25},
    "capped": {"logit_softcap": 3.0},
    "all": {"logit_scale": 2.0, "logit_softcap": 5.0, "bias": True},
}


@dataclass
class Case:
    hidden: Tensor
    markov: Tensor | None
    w2: Tensor | None
    task: RowTask

    def run(self, **over: Any) -> tuple[BlockLoss, list[Tensor]]:
        loss = block_loss(self.hidden, replace(self.task, **over), self.markov, self.w2)
        inputs = [t for t in (self.hidden, self.markov, self.w2) if t is not None]
        return loss, list(torch.autograd.grad(1.7 * loss.total, inputs))

    def obvious(self, *, rounded: bool = False) -> tuple[BlockLoss, list[Tensor]]:
        """The same with whole logits and autograd; ``rounded`` to bf16, which no gradient sees."""
        task = self.task
        z = task.head.logits(self.hidden)
        if self.markov is not None and self.w2 is not None:
            z = z + self.markov @ self.w2.t()
        t = task.head.logits(task.target_hidden)[task.target_index]
        if rounded:
            z, t = z + (z.bfloat16().to(z) - z).detach(), t.bfloat16().to(t)
        ce, l1 = rows.cross_entropy(z, task.labels), rows.l1_distance(z, t)
        soft = rows.soft_cross_entropy(z, t) if task.uses_soft else torch.zeros_like(ce)
        value = task.ce * ce + task.soft * soft + task.l1 * l1
        if task.lk:
            value = value + task.lk * rows.negative_log_acceptance(z, t)
        if task.mix:
            value = value + task.mix * rows.adaptive_mix(z, t, task.eta)
        reverse = rows.reverse_kl(z, t) if task.reverse else torch.zeros_like(ce)
        jsd = rows.jensen_shannon(z, t) if task.jsd else torch.zeros_like(ce)
        value = value + task.reverse * reverse + task.jsd * jsd
        total = (task.weights * value).sum()
        inputs = [x for x in (self.hidden, self.markov, self.w2) if x is not None]
        agreement = (z.argmax(-1) == t.argmax(-1)).to(ce.dtype)
        loss = BlockLoss(total, ce, soft, l1, agreement, reverse, jsd)
        return loss, list(torch.autograd.grad(1.7 * total, inputs))

    def widened(self) -> Case:
        """The same numbers in fp64."""
        task = self.task
        wide = replace(
            task,
            target_hidden=task.target_hidden.double(),
            weights=task.weights.double(),
            head=task.head.to(dtype=torch.float64),
        )
        markov, w2 = (None if x is None else x.detach().double().requires_grad_() for x in (self.markov, self.w2))
        return Case(self.hidden.detach().double().requires_grad_(), markov, w2, wide)


def make(
    head: str = "plain",
    *,
    markov: bool = True,
    dtype: torch.dtype = torch.float64,
    scale: float = 1.0,
    vocab: int = VOCAB,
    num_rows: int = ROWS,
) -> Case:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    options = dict(HEADS[head])
    bias = randn(vocab).to(dtype) if options.pop("bias", False) else None
    weight = (randn(vocab, WIDTH) * 0.5 * scale).to(dtype)
    index = torch.randint(0, POSITIONS, (num_rows,), generator=generator)
    target = randn(POSITIONS, WIDTH).to(dtype)
    weights = torch.rand(num_rows, generator=generator, dtype=torch.float64).to(dtype)
    weights[::4] = 0.0
    task = RowTask(
        target_hidden=target,
        target_index=index,
        labels=torch.randint(0, vocab, (num_rows,), generator=generator),
        weights=weights,
        head=FrozenHead(embedding=weight, weight=weight, bias=bias, **options),
        ce=CE,
        l1=L1,
    )
    near = (target[index].double() + 0.3 * randn(num_rows, WIDTH)).to(dtype)
    return Case(
        near.requires_grad_(),
        randn(num_rows, RANK).to(dtype).requires_grad_() if markov else None,
        (randn(vocab, RANK) * 0.3).to(dtype).requires_grad_() if markov else None,
        task,
    )


def same(fused: tuple[BlockLoss, list[Tensor]], plain: tuple[BlockLoss, list[Tensor]], tolerance: float) -> None:
    for value, expected in zip(fused[0], plain[0], strict=True):
        torch.testing.assert_close(value, expected, atol=tolerance, rtol=tolerance)
    for gradient, expected in zip(fused[1], plain[1], strict=True):
        assert (gradient - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("head", list(HEADS))
def test_value_and_gradient_in_fp64(head: str, markov: bool, mode: str) -> None:
    case = make(head, markov=markov)
    same(case.run(mode=mode), case.obvious(), 1e-12)


@pytest.mark.parametrize("chunk_rows", [7, 1000])
@pytest.mark.parametrize(("ce", "l1"), [(0.0, 0.0), (0.1, 0.9)])
def test_the_soft_cross_entropy(ce: float, l1: float, chunk_rows: int) -> None:
    case = make("all")
    case.task = replace(case.task, ce=ce, l1=l1, soft=0.7)
    same(case.run(chunk_rows=chunk_rows), case.obvious(), 1e-12)


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("terms", [{"lk": 0.8}, {"mix": 0.8, "eta": 3.0}, {"lk": 0.2, "mix": 0.3, "soft": 0.4}])
@pytest.mark.parametrize(("ce", "l1"), [(0.0, 0.0), (0.1, 0.9)])
def test_likelihood_of_acceptance(ce: float, l1: float, terms: dict[str, float], mode: Any) -> None:
    case = make("all")
    case.task = replace(case.task, ce=ce, l1=l1, mode=mode, **terms)  # type: ignore[arg-type]
    same(case.run(chunk_rows=7), case.obvious(), 1e-11)


DIVERGENCES = [{"reverse": 0.6}, {"jsd": 0.7}, {"reverse": 0.3, "jsd": 0.4, "soft": 0.2, "lk": 0.1, "mix": 0.5}]


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
@pytest.mark.parametrize("terms", DIVERGENCES)
@pytest.mark.parametrize(("ce", "l1"), [(0.0, 0.0), (0.1, 0.9)])
def test_the_other_divergences(ce: float, l1: float, terms: dict[str, float], mode: Any) -> None:
    case = make("all")
    case.task = replace(case.task, ce=ce, l1=l1, mode=mode, **terms)  # type: ignore[arg-type]
    same(case.run(chunk_rows=7), case.obvious(), 1e-11)


@pytest.mark.parametrize("terms", DIVERGENCES)
def test_the_other_divergences_in_fp32(terms: dict[str, float]) -> None:
    case = make("all", dtype=torch.float32)
    case.task = replace(case.task, **terms)  # type: ignore[arg-type]
    same(case.run(), case.obvious(), 1e-5)


@pytest.mark.parametrize("scale", [30.0, 200.0])
@pytest.mark.parametrize("terms", DIVERGENCES[:2])
def test_the_other_divergences_of_saturated_rows(terms: dict[str, float], scale: float) -> None:
    """p and q underflow at most tokens; KL(q || p) is as large as the logits, its gradient 0 where q is one-hot."""
    case = make(dtype=torch.float32, scale=scale)
    case.task = replace(case.task, ce=0.0, l1=0.0, **terms)  # type: ignore[arg-type]
    (loss, gradients), wide = case.run(), case.widened().obvious()
    p = case.task.head.logits(case.task.target_hidden).softmax(-1)
    assert (p == 0.0).any(-1).all()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    if "reverse" in terms:
        assert loss.reverse.max() > scale
    torch.testing.assert_close(loss.reverse.double(), wide[0].reverse, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(loss.jsd.double(), wide[0].jsd, atol=1e-4, rtol=1e-4)
    for gradient, expected in zip(gradients, wide[1], strict=True):
        assert (gradient.double() - expected).norm() <= 1e-3 * expected.norm() + 1e-6


@pytest.mark.parametrize("mode", ["exact", "common_mode"])
def test_the_other_divergences_of_low_precision_states(mode: Any) -> None:
    """fp32 products of bf16 numbers are right to 1e-5; common_mode rounds h_draft - h_target, one part in 256 of it."""
    case = make(dtype=torch.bfloat16, markov=False)
    case.task = replace(case.task, reverse=0.6, jsd=0.7, mode=mode)
    (fused, gradients), (plain, expected) = case.run(), case.widened().obvious()
    tolerance = 1e-5 if mode == "exact" else 2e-2
    for value, wanted in ((fused.reverse, plain.reverse), (fused.jsd, plain.jsd)):
        assert (value.double() - wanted).norm() <= tolerance * wanted.norm()
    assert gradients[0].dtype == torch.bfloat16
    assert (gradients[0].double() - expected[0]).norm() <= max(1e-2, 2 * tolerance) * expected[0].norm()


def test_buffers_are_there_for_what_is_asked() -> None:
    task, asked = make().task, [{}, {"soft": 1.0}, {"reverse": 1.0}, {"jsd": 1.0}]
    sizes = [replace(task, **over).num_buffers for over in asked]  # type: ignore[arg-type]
    assert sizes == [3, 4, 4, 5]


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 1000])
def test_the_size_of_a_chunk_changes_nothing(chunk_rows: int) -> None:
    case = make("all")
    same(case.run(chunk_rows=chunk_rows), case.obvious(), 1e-12)


def test_value_and_gradient_in_fp32() -> None:
    """fp32 keeps about 1e-7 a value; sign(q - p) may flip where q and p are equal to that, which moves little."""
    case = make("all", dtype=torch.float32)
    same(case.run(), case.obvious(), 1e-5)


def test_saturated_rows_stay_finite_and_right() -> None:
    """One-hot p and q: the draft's probability of the label is 0 in fp32, its cross-entropy is not infinite."""
    case = make(dtype=torch.float32, scale=200.0)
    fused, plain = case.run(), case.obvious()
    assert torch.isfinite(fused[0].total)
    assert fused[0].ce.max() > 100
    same(fused, plain, 1e-4)


def test_zero_weights_give_zero() -> None:
    case = make()
    loss, gradients = case.run(weights=torch.zeros(ROWS, dtype=torch.float64))
    assert loss.total.item() == 0.0
    assert not any(gradient.any() for gradient in gradients)


def test_no_rows() -> None:
    case = make(num_rows=0)
    loss, gradients = case.run()
    assert loss.total.item() == 0.0
    assert not any(gradient.any() for gradient in gradients)


def test_without_gradient_the_values_are_the_same() -> None:
    case = make()
    with torch.no_grad():
        loss = block_loss(case.hidden, case.task, case.markov, case.w2)
    torch.testing.assert_close(loss.total, case.obvious()[0].total)
    assert not loss.total.requires_grad


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    case = make()
    loss, _ = case.run()
    z = case.task.head.logits(case.hidden) + case.markov @ case.w2.t()  # type: ignore[operator, union-attr]
    p = case.task.head.logits(case.task.target_hidden)[case.task.target_index].softmax(-1)
    torch.testing.assert_close(loss.acceptance, torch.minimum(z.softmax(-1), p).sum(-1))


def test_low_precision_exact_keeps_fp32_products() -> None:
    case = make(dtype=torch.bfloat16, markov=False)
    (fused, gradients), (plain, expected) = case.run(), case.widened().obvious()
    torch.testing.assert_close(fused.l1.double(), plain.l1, atol=1e-5, rtol=1e-5)
    assert gradients[0].dtype == torch.bfloat16
    assert (gradients[0].double() - expected[0]).norm() <= 1e-2 * expected[0].norm()


def test_common_mode_cancels_the_rounding_of_low_precision_products() -> None:
    """A draft close to its target: rounded logits drown the difference, the common mode keeps it."""
    torch.manual_seed(0)
    width, vocab, num_rows = 64, 512, 40
    weight = (torch.randn(vocab, width) * 0.5).bfloat16()
    target = torch.randn(num_rows, width).bfloat16()
    hidden = (target.float() + 0.02 * torch.randn(num_rows, width)).bfloat16()
    task = RowTask(
        target, torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.long), torch.ones(num_rows),
        FrozenHead(weight, weight), 0.0, 1.0, "common_mode",
    )  # fmt: skip
    common = block_loss(hidden, task).l1.double()
    wide = weight.double()
    exact = rows.l1_distance(hidden.double() @ wide.t(), target.double() @ wide.t())
    naive = rows.l1_distance(hidden @ weight.t(), target @ weight.t()).double()
    assert (common - exact).norm() < 0.2 * (naive - exact).norm()


@pytest.mark.slow
def test_a_large_vocabulary() -> None:
    case = make(dtype=torch.float32, vocab=151936, num_rows=12)
    same(case.run(chunk_rows=5), case.obvious(), 1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_rounded_logits_are_those_of_code_that_forms_them_in_bf16(head: str) -> None:
    case = make(head, scale=4.0)
    (ours, gradients), (want, expected) = case.run(mode="bf16_logits", chunk_rows=7), case.obvious(rounded=True)
    for name in ("total", "ce", "l1", "agreement"):
        torch.testing.assert_close(getattr(ours, name), getattr(want, name))
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)
    exact = case.run()[0]
    assert float((ours.l1 - exact.l1).abs().max()) > 1e-3  # it is not the exact loss by another name
