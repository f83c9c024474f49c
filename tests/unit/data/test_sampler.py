"""Properties of the batch plan and of anchors, on seeded random inputs."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from deepspec.data.anchors import anchor_candidates, draw_anchors
from deepspec.data.sampler import BatchPlan, Entry, pack, validation_batches
from deepspec.errors import ConfigError, DataError

SHAPES = [(1, 4), (1, 1), (2, 2), (2, 1), (4, 1)]  # (world, micro) of a global batch of 4


def lengths_of(num: int, seed: int = 0) -> list[int]:
    lengths: list[int] = np.random.default_rng(seed).integers(5, 400, num).tolist()
    return lengths


def plan(num: int, *, size: int = 4, micro: int = 4, world: int = 1, seed: int = 0, window: int = 8) -> BatchPlan:
    return BatchPlan(
        lengths_of(num), global_batch_size=size, micro_batch_size=micro, world_size=world, seed=seed, window=window
    )


@pytest.mark.parametrize("num", [1, 3, 4, 37, 100])
@pytest.mark.parametrize(("world", "micro"), SHAPES)
def test_the_set_of_a_step_does_not_depend_on_ranks_or_accumulation(num: int, world: int, micro: int) -> None:
    reference, split = plan(num), plan(num, micro=micro, world=world)
    for step in range(30):
        entries = [e for rank in range(world) for batch in split.micro_batches(step, rank) for (e,) in batch]
        assert Counter(entries) == Counter(reference.global_batch(step))
        for rank in range(world):
            batches = split.micro_batches(step, rank)
            assert len(batches) == 4 // (world * micro)
            assert all(len(batch) == micro for batch in batches)


@pytest.mark.parametrize("num", [1, 3, 7, 64, 101, 1000])
@pytest.mark.parametrize("size", [1, 4, 12])
def test_every_sample_comes_once_an_epoch(num: int, size: int) -> None:
    p = plan(num, size=size, micro=1)
    epochs = size  # so many epochs fill whole batches exactly
    entries = [e for step in range(p.num_steps(epochs)) for e in p.global_batch(step)]
    assert Counter(entries) == Counter(Entry(i, epoch) for i in range(num) for epoch in range(epochs))


def test_the_incomplete_batch_of_an_epoch_is_filled_by_the_next() -> None:
    p = plan(10)
    assert p.num_steps(1) == 2
    assert p.num_steps(2) == 5
    assert Counter(e.epoch for e in p.global_batch(2)) == {0: 2, 1: 2}
    assert plan(1).num_steps(1) == 1
    assert [e.epoch for e in plan(1).global_batch(1)] == [4, 5, 6, 7]


def test_a_step_is_computed_directly_and_depends_on_the_seed() -> None:
    straight, late = plan(50), plan(50)
    order = [straight.micro_batches(step) for step in range(40)]
    assert late.micro_batches(39) == order[39]
    assert late.micro_batches(3) == order[3]
    assert plan(50, seed=1).micro_batches(3) != order[3]
    assert order[0] != order[13], "epochs differ"


def test_little_padding_yet_steps_in_mixed_order() -> None:
    size, micro = 16, 4
    p = plan(1600, size=size, micro=micro)
    padded = tokens = 0
    means = []
    for step in range(100):
        batches = p.micro_batches(step)
        means.append(np.mean([p.lengths[e.index] for b in batches for (e,) in b]))
        for batch in batches:
            row = [int(p.lengths[e.index]) for (e,) in batch]
            padded += max(row) * micro
            tokens += sum(row)
    assert padded / tokens < 1.06
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3, "neighbouring steps are not of similar length"


def test_ranks_of_a_slot_get_about_the_same_length() -> None:
    p = plan(800, size=64, micro=4, world=2, window=1)
    for step in range(5):
        longest = [[max(p.lengths[e.index] for (e,) in b) for b in p.micro_batches(step, rank)] for rank in (0, 1)]
        totals = [sum(x) for x in longest]
        assert abs(totals[0] - totals[1]) < 0.05 * sum(totals)
        assert longest[0] == sorted(longest[0], reverse=True)


def packed_plan(num: int = 60, *, size: int = 12, micro: int = 1, world: int = 1, room: int = 512) -> BatchPlan:
    return BatchPlan(
        lengths_of(num), global_batch_size=size, micro_batch_size=micro, world_size=world, seed=0, row_tokens=room
    )


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)])
def test_packed_rows_hold_the_samples_of_the_step_and_no_row_is_too_long(world: int, micro: int) -> None:
    reference, split = packed_plan(), packed_plan(micro=micro, world=world)
    for step in range(20):
        ranks = [split.micro_batches(step, rank) for rank in range(world)]
        assert len({len(batches) for batches in ranks}) == 1, "every rank has as many micro-batches"
        rows = [row for batches in ranks for batch in batches for row in batch]
        assert all(len(batch) == micro for batches in ranks for batch in batches)
        assert Counter(e for row in rows for e in row) == Counter(reference.global_batch(step))
        assert all(sum(split.lengths[e.index] for e in row) <= 512 for row in rows)
        assert sum(not row for row in rows) < world * micro


def test_packed_rows_are_nearly_full() -> None:
    p = packed_plan(600, size=48, room=1024)
    rows = [[int(p.lengths[e.index]) for e in row] for step in range(12) for row in p.rows(step)]
    assert sum(map(sum, rows)) > 0.93 * 1024 * len(rows)


def test_packing_by_hand() -> None:
    entries = [Entry(i, 0) for i in range(6)]
    rows = pack([7, 5, 4, 3, 2, 2], entries, 10)
    assert [[e.index for e in row] for row in rows] == [[0, 3], [1, 2], [4, 5]]


def test_impossible_plans() -> None:
    with pytest.raises(ConfigError, match=r"data\.row_tokens=100: a sample has \d+ tokens; see data\.max_length"):
        packed_plan(room=100)
    with pytest.raises(ConfigError, match=r"global_batch_size=4.*micro_batch_size=3 times 1"):
        plan(10, micro=3)
    with pytest.raises(DataError, match="no sample"):
        plan(0)


@pytest.mark.parametrize(("num", "world", "micro"), [(0, 1, 4), (1, 2, 4), (9, 2, 2), (16, 2, 4), (7, 1, 3)])
def test_validation_passes_once_over_everything(num: int, world: int, micro: int) -> None:
    ranks = [
        validation_batches(lengths_of(num), micro_batch_size=micro, world_size=world, rank=r) for r in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    entries = [e for batches in ranks for batch in batches for (e,) in batch]
    assert Counter(e.index for e in entries if e.counted) == Counter(range(num))
    assert all(len(batch) == micro for batches in ranks for batch in batches)


def random_mask(seed: int, size: int = 60) -> list[bool]:
    mask: list[bool] = (np.random.default_rng(seed).random(size) < 0.7).tolist()
    return mask


@pytest.mark.parametrize("seed", range(20))
def test_anchors_are_sorted_supervised_pairs(seed: int) -> None:
    mask = random_mask(seed)
    candidates = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    assert anchor_candidates(mask).tolist() == candidates
    drawn = draw_anchors(mask, seed, 0, "x", 8)
    assert drawn == sorted(set(drawn))
    assert len(drawn) == min(8, len(candidates))
    assert set(drawn) <= set(candidates)
    assert draw_anchors(mask, seed, 0, "x", 1000) == candidates


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_anchors_in_proportion_to_what_is_supervised(share: float) -> None:
    for supervised in (2, 11, 31, 101):
        mask = [False] * 3 + [True] * supervised
        drawn = draw_anchors(mask, 0, 0, "x", 50, share)
        assert len(drawn) == min(50, math.ceil(share * (supervised - 1)))
        assert drawn == sorted(set(drawn))


def test_anchors_are_a_pure_function_of_seed_epoch_and_id() -> None:
    mask = [False] * 5 + [True] * 100
    base = draw_anchors(mask, 1, 2, "a/b/3", 10)
    assert base == draw_anchors(mask, 1, 2, "a/b/3", 10)
    others = [draw_anchors(mask, *key, 10) for key in [(2, 2, "a/b/3"), (1, 3, "a/b/3"), (1, 2, "a/b/4")]]
    assert all(other != base for other in others)
    # Written down once: a change of the drawing would change every run that is resumed.
    assert base == [12, 14, 17, 33, 35, 37, 57, 64, 80, 101]
    assert draw_anchors([True], 0, 0, "x", 4) == draw_anchors([], 0, 0, "x", 4) == []


def test_every_candidate_is_drawn_equally_often() -> None:
    mask = [True] * 21
    counts = Counter(a for epoch in range(2000) for a in draw_anchors(mask, 0, epoch, "x", 5))
    assert set(counts) == set(range(20))
    assert all(400 < n < 600 for n in counts.values()), "500 expected, standard deviation 19"
