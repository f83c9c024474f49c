"""Which draft rows a pass scores together, and in which order.

Rows that overlap in time ask for the same target position. Rows are sorted by it, so that the target's logits are
formed once for each distinct position and no two chunks share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Chunk(NamedTuple):
    """What is scored together."""

    rows: slice  # of the pass's order
    positions: slice  # of ``Plan.positions``


class Plan(NamedTuple):
    """The order of a pass over R rows."""

    order: Tensor  # [R] the caller's row at each place of the pass
    inverse: Tensor  # [R] the place of each of the caller's rows
    positions: Tensor  # [U'] the target positions, as the pass comes to them
    judge: Tensor  # [R] the place in ``positions`` of each row, in the pass's order
    chunks: list[Chunk]


def by_position(target_index: Tensor, chunk_rows: int) -> Plan:
    """Sort rows by the target position ``target_index`` [R] that judges them; one position never spans two chunks."""
    order = torch.argsort(target_index, stable=True)
    positions, judge, counts = torch.unique_consecutive(target_index[order], return_inverse=True, return_counts=True)
    chunks = [Chunk(rows, items) for rows, items in _cut(counts.tolist(), chunk_rows)]
    return Plan(order, _inverse(order), positions, judge, chunks)


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
