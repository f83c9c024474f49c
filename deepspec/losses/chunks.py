"""Which draft rows a pass scores together, and in which order.

Rows that overlap in time ask for the same target position. The rows of a chunk are sorted by it, so that the target's
logits are formed once for each distinct position. No two chunks share one, unless blocks are to stay whole: then the
last positions of a chunk and the first of the next may be the same.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Chunk(NamedTuple):
    """What is scored together."""

    rows: slice  # of the pass's order
    positions: slice  # of ``Plan.positions``
    blocks: slice = slice(0, 0)  # by the numbers of ``Plan.block``


class Plan(NamedTuple):
    """The order of a pass over R rows."""

    order: Tensor  # [R] the caller's row at each place of the pass
    inverse: Tensor  # [R] the place of each of the caller's rows
    positions: Tensor  # [U'] the target positions, as the pass comes to them
    judge: Tensor  # [R] the place in ``positions`` of each row, in the pass's order
    chunks: list[Chunk]
    block: Tensor | None = None  # [R] the number of each row's block, in the pass's order; None: they may be torn


def by_position(target_index: Tensor, chunk_rows: int) -> Plan:
    """Sort rows by the target position ``target_index`` [R] that judges them; one position never spans two chunks."""
    order = torch.argsort(target_index, stable=True)
    positions, judge, counts = torch.unique_consecutive(target_index[order], return_inverse=True, return_counts=True)
    chunks = [Chunk(rows, items) for rows, items in _cut(counts.tolist(), chunk_rows)]
    return Plan(order, _inverse(order), positions, judge, chunks)


def by_block(target_index: Tensor, block: Tensor, num_positions: int, chunk_rows: int) -> Plan:
    """Keep the rows of a block, those of one number in ``block`` [R], in one chunk.

    Blocks are numbered anew in the order of their first positions, so that those which overlap meet in a chunk.
    ``target_index`` [R] is below ``num_positions``.
    """
    _, member, sizes = torch.unique(block, return_inverse=True, return_counts=True)
    first = torch.full_like(sizes, num_positions).scatter_reduce(0, member, target_index, "amin")
    by_start = torch.argsort(first, stable=True)
    number = _inverse(by_start)[member]  # [R]
    groups = _cut(sizes[by_start].tolist(), chunk_rows)
    heights = torch.tensor([blocks.stop - blocks.start for _, blocks in groups], dtype=torch.int64, device=block.device)
    chunk = torch.repeat_interleave(torch.arange(len(groups), device=block.device), heights)[number]  # [R]
    key = chunk * num_positions + target_index
    order = torch.argsort(key, stable=True)
    keys, judge = torch.unique_consecutive(key[order], return_inverse=True)
    used = torch.bincount(keys // num_positions, minlength=len(groups)).tolist()
    chunks = [
        Chunk(rows, slice(end - count, end), blocks)
        for (rows, blocks), count, end in zip(groups, used, accumulate(used), strict=True)
    ]
    return Plan(order, _inverse(order), keys % num_positions, judge, chunks, number[order])


def _cut(counts: list[int], chunk_rows: int) -> list[tuple[slice, slice]]:
    """Group items of ``counts`` rows each, in their order; return the rows and the items of every group.

    A group has at most ``chunk_rows`` rows, unless a single item has more.
    """
    groups: list[tuple[slice, slice]] = []
    start = first = stop = 0
    for item, count in enumerate(counts):
        if stop > start and stop - start + count > chunk_rows:
            groups.append((slice(start, stop), slice(first, item)))
            start, first = stop, item
        stop += count
    return [*groups, (slice(start, stop), slice(first, len(counts)))] if counts else []


def _inverse(order: Tensor) -> Tensor:
    """Return the place [n] of each entry of a permutation [n]."""
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return places
