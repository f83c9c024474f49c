"""Batches, denominators however they are split, and a loader that fails with the data's own error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import overload

import numpy as np
import pytest
import torch

from deepspec.contracts import Batch, Sample
from deepspec.data.collate import Document, collate
from deepspec.data.loader import BatchLoader, BatchMaker
from deepspec.data.sampler import BatchPlan, Entry
from deepspec.errors import DataError


def make_samples(num: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num):
        size, prompt = int(rng.integers(12, 90)), int(rng.integers(2, 10))
        ids = tuple(int(x) for x in rng.integers(1, 97, size))
        samples.append(Sample(f"s/{i}", ids, tuple(j >= prompt for j in range(size))))
    return samples


def plan_for(samples: Sequence[Sample], *, size: int = 8, micro: int = 8, world: int = 1) -> BatchPlan:
    lengths = [len(s.input_ids) for s in samples]
    return BatchPlan(lengths, global_batch_size=size, micro_batch_size=micro, world_size=world, seed=3)


def test_collate_pads_and_buckets() -> None:
    a = Sample("a", (5, 6, 7, 8, 9), (False, True, True, True, True))
    b = Sample("b", tuple(range(1, 19)), (False,) * 10 + (True,) * 8)
    batch = collate([[Document(a, [1, 3])], [Document(b, [10, 11, 12, 13, 14, 15, 16, 10, 11])]], pad_id=2)
    assert batch.input_ids.shape == batch.segment_ids.shape == batch.loss_mask.shape == (2, 32)
    assert batch.anchor_indices.shape == batch.anchor_mask.shape == (2, 16)
    assert batch.input_ids[0].tolist() == [5, 6, 7, 8, 9] + [2] * 27
    assert batch.segment_ids.sum(1).tolist() == [5, 18]
    assert batch.position_ids[1].tolist() == list(range(18)) + [0] * 14
    assert batch.loss_mask[0].nonzero().flatten().tolist() == [1, 2, 3, 4]
    assert batch.anchor_indices[0][batch.anchor_mask[0]].tolist() == [1, 3]
    assert batch.sample_ids == ("a", "b")
    assert [t.dtype for t in (batch.input_ids, batch.anchor_indices, batch.anchor_mask)] == [
        torch.int64, torch.int64, torch.bool,
    ]  # fmt: skip


def test_a_batch_without_anchors_keeps_its_shape() -> None:
    batch = collate([[Document(Sample("a", (1, 2), (False, True)), [])]])
    assert batch.anchor_mask.shape == (1, 8)
    assert not batch.anchor_mask.any()


def test_documents_of_a_row_lie_one_behind_the_other() -> None:
    a = Sample("a", (5, 6, 7), (False, True, True))
    b = Sample("b", (8, 9, 10, 11), (False, False, True, True))
    batch = collate([[Document(a, [1]), Document(b, [2])], []], pad_id=2)
    assert batch.input_ids.shape == (2, 16)
    assert batch.input_ids[0, :8].tolist() == [5, 6, 7, 8, 9, 10, 11, 2]
    assert batch.segment_ids[0, :8].tolist() == [1, 1, 1, 2, 2, 2, 2, 0]
    assert batch.position_ids[0, :8].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert batch.loss_mask[0, :8].tolist() == [False, True, True, False, False, True, True, False]
    assert batch.anchor_indices[0][batch.anchor_mask[0]].tolist() == [1, 5]
    assert batch.sample_ids == ("a", "b")
    assert not batch.segment_ids[1].any()
    assert not batch.anchor_mask[1].any()


def test_shapes_hardly_vary_with_the_data() -> None:
    samples = make_samples(10)
    make = BatchMaker(samples, seed=0, anchors_per_sample=20)
    shapes = {make([(Entry(i, 0),)]).anchor_indices.shape for i in range(10)}
    assert shapes <= {(1, 8), (1, 16), (1, 24)}
    assert all(make([(Entry(i, 0),)]).input_ids.shape[1] % 16 == 0 for i in range(10))


def test_fillers_have_no_anchor() -> None:
    batch = BatchMaker(make_samples(2), seed=0, anchors_per_sample=4)([(Entry(0, 0),), (Entry(1, 0, counted=False),)])
    assert batch.anchor_mask.sum(1).tolist() == [4, 0]


def anchors_of(batches: Sequence[Batch]) -> set[tuple[str, int]]:
    return {
        (batch.sample_ids[row], int(batch.anchor_indices[row, col]))
        for batch in batches
        for row, col in batch.anchor_mask.nonzero().tolist()
    }


@pytest.mark.parametrize(("world", "micro"), [(1, 2), (2, 4), (2, 1), (4, 2)])
def test_the_same_anchors_however_a_step_is_split(world: int, micro: int) -> None:
    samples = make_samples(21)
    make = BatchMaker(samples, seed=3, anchors_per_sample=6)
    whole, split = plan_for(samples), plan_for(samples, micro=micro, world=world)
    for step in range(6):
        reference = [make(e) for e in whole.micro_batches(step)]
        parts = [make(e) for rank in range(world) for e in split.micro_batches(step, rank)]
        assert anchors_of(parts) == anchors_of(reference)
        # The denominator of a step is summed over ranks and micro-batches, so it cannot depend on the split.
        assert sum(int(b.anchor_mask.sum()) for b in parts) == int(reference[0].anchor_mask.sum())


def test_the_loader_yields_the_plan_and_starts_anywhere() -> None:
    samples = make_samples(13)
    make, plan = BatchMaker(samples, seed=1, anchors_per_sample=4), plan_for(samples, micro=2, world=2)
    for rank in (0, 1):
        loaded = list(BatchLoader(make, plan, start=0, stop=5, rank=rank))
        assert [step for step, _ in loaded] == list(range(5))
        later = list(BatchLoader(make, plan, start=3, stop=5, rank=rank))
        for (_, a), (_, b) in zip(loaded[3:], later, strict=True):
            assert all(torch.equal(x.input_ids, y.input_ids) for x, y in zip(a, b, strict=True))
            assert all(torch.equal(x.anchor_indices, y.anchor_indices) for x, y in zip(a, b, strict=True))


class Failing(Sequence[Sample]):
    """Raises at one index."""

    def __init__(self, samples: list[Sample], bad: int) -> None:
        self.samples, self.bad = samples, bad

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        if index == self.bad:
            raise DataError("sample 3 is broken")
        return self.samples[index]


@pytest.mark.timeout(30)
def test_a_failing_dataset_stops_the_run_with_its_own_error() -> None:
    samples = make_samples(8)
    plan = plan_for(samples, size=1, micro=1)
    steps = [plan.global_batch(step)[0].index for step in range(8)]
    loader = BatchLoader(BatchMaker(Failing(samples, 3), seed=0, anchors_per_sample=4), plan, start=0, stop=8)
    seen = []
    with pytest.raises(DataError, match="sample 3 is broken"):
        for step, batches in loader:
            seen.append((step, batches[0].sample_ids[0]))
    assert seen == [(step, f"s/{index}") for step, index in enumerate(steps[: steps.index(3)])]


@pytest.mark.timeout(30)
def test_leaving_early_ends_the_thread() -> None:
    samples = make_samples(8)
    loader = BatchLoader(BatchMaker(samples, seed=0, anchors_per_sample=4), plan_for(samples), start=0, stop=10**6)
    for step, _ in loader:
        if step == 2:
            break
    assert not [t for t in threading.enumerate() if t.name == "batch-loader"]


def gradient(batches: Sequence[Batch], denominators: Sequence[float]) -> torch.Tensor:
    """Gradient of a toy objective: a value for each anchor, summed and divided by the batch's denominator."""
    weight = torch.linspace(-1, 1, 97, dtype=torch.float64, requires_grad=True)
    for batch, denominator in zip(batches, denominators, strict=True):
        tokens = batch.input_ids.gather(1, batch.anchor_indices)  # [B, A]
        values = (weight[tokens] - batch.anchor_indices / 50).square() * batch.anchor_mask
        (values.sum() / denominator).backward()
    if weight.grad is None:
        raise RuntimeError("no gradient")
    return weight.grad


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("world", "micro"), [(2, 1), (1, 1), (2, 2)])
def test_a_tokens_weight_depends_neither_on_its_rank_nor_on_its_micro_batch(world: int, micro: int) -> None:
    # 1 and 9 anchors, 30 and 2: the masks are as uneven as they come
    samples = [
        Sample(f"s/{i}", tuple(range(1, 41)), (False,) * 5 + (True,) * n + (False,) * (35 - n))
        for i, n in enumerate([2, 10, 31, 3])
    ]
    make = BatchMaker(samples, seed=0, anchors_per_sample=64)
    whole = [make(e) for e in plan_for(samples, size=4, micro=4).micro_batches(0)]
    plan = plan_for(samples, size=4, micro=micro, world=world)
    parts = [make(e) for rank in range(world) for e in plan.micro_batches(0, rank)]
    counts = [float(b.anchor_mask.sum()) for b in parts]
    total = sum(counts)
    reference = gradient(whole, [float(whole[0].anchor_mask.sum())])
    assert relative(gradient(parts, [total] * len(parts)), reference) < 1e-12
    planted = gradient(parts, [count * len(parts) for count in counts])  # each micro-batch its own mean
    assert relative(planted, reference) > 0.05
