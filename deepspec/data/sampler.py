"""Which samples make up which optimiser step, rank and micro-batch: a stateless plan.

The samples of all epochs form one endless stream, each epoch a permutation of its own, and step n takes the stream's
positions n*G .. (n+1)*G-1 (G: samples of a global batch). So

* every sample comes exactly once an epoch; the batch that an epoch leaves incomplete is filled by the next epoch, and
  only the last incomplete batch of a whole run is left out;
* the set of a step depends on (seed, step) alone, never on ranks or accumulation, and any step is computed directly.

Little padding, in one of two ways. One sample a row: an epoch is shuffled, sorted by length inside windows of several
global batches, cut into global batches, and these are shuffled again. Packed: the samples of a global batch, longest
first, go into rows of at most ``row_tokens`` tokens, each into the first that has room; mixed lengths fill rows best,
so nothing is sorted before. Inside a global batch, micro-batches take rows that are neighbours in length, and the ranks
of one slot get micro-batches of about the same length, the longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from deepspec.errors import ConfigError, DataError


@dataclass(frozen=True)
class Entry:
    """A sample in a batch: its index, and the epoch that its anchors are drawn for.

    ``counted`` is False for a filler: a row that only keeps shapes and ranks equal, and gets no anchor.
    """

    index: int
    epoch: int
    counted: bool = True


Row = tuple[Entry, ...]
"""The samples that lie in one row of a batch; none in a row that only makes ranks equal."""


class BatchPlan:
    """The training plan of a run."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        global_batch_size: int,
        micro_batch_size: int,
        world_size: int = 1,
        seed: int = 0,
        window: int = 8,
        row_tokens: int | None = None,
    ) -> None:
        """Plan over samples of ``lengths`` tokens.

        Args:
            lengths: tokens of each sample.
            global_batch_size: samples of a step.
            micro_batch_size: rows of a micro-batch.
            world_size: ranks.
            seed: of the order.
            window: global batches that are sorted together, where a row takes one sample.
            row_tokens: most tokens of a packed row; None puts one sample into a row.

        Raises:
            DataError: there is no sample.
            ConfigError: a sample does not fit a row, or, without packing, the global batch is no multiple of
                micro-batch times ranks.
        """
        if not lengths:
            raise DataError("there is no sample to train on; see data.train and data.max_length")
        if row_tokens is not None and max(lengths) > row_tokens:
            raise ConfigError(f"data.row_tokens={row_tokens}: a sample has {max(lengths)} tokens; see data.max_length")
        if row_tokens is None and global_batch_size % (micro_batch_size * world_size):
            raise ConfigError(
                f"engine.global_batch_size={global_batch_size} must be a multiple of engine.micro_batch_size="
                f"{micro_batch_size} times {world_size} ranks"
            )
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.world_size = world_size
        self.seed = seed
        self.window = window
        self.row_tokens = row_tokens
        self._order = lru_cache(maxsize=4)(self._epoch_order)

    def num_steps(self, epochs: int) -> int:
        """Return the optimiser steps of ``epochs`` passes: whole batches, and at least one."""
        return max(1, epochs * len(self.lengths) // self.global_batch_size)

    def global_batch(self, step: int) -> list[Entry]:
        """Return the entries of a step, longest first."""
        num, first = len(self.lengths), step * self.global_batch_size
        entries = []
        for position in range(first, first + self.global_batch_size):
            epoch, offset = divmod(position, num)
            entries.append(Entry(int(self._order(epoch)[offset]), epoch))
        return sorted(entries, key=lambda e: (-int(self.lengths[e.index]), e.epoch, e.index))

    def rows(self, step: int) -> list[Row]:
        """Return the rows of a step, those with most tokens first."""
        entries = self.global_batch(step)
        if self.row_tokens is None:
            return [(entry,) for entry in entries]
        return pack([int(self.lengths[e.index]) for e in entries], entries, self.row_tokens)

    def micro_batches(self, step: int, rank: int = 0) -> list[list[Row]]:
        """Return the micro-batches of one rank in a step, as many as any other rank has; empty rows fill the last."""
        rows = self.rows(step)
        rows += [()] * (-len(rows) % (self.micro_batch_size * self.world_size))
        return _deal(rows, self.micro_batch_size, self.world_size, rank)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch; its global batches begin where the stream's do."""
        size, num = self.global_batch_size, len(self.lengths)
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(num)
        if self.row_tokens is not None:
            return order
        head = min(num, -epoch * num % size)  # completes the batch that the epoch before left open
        whole = (num - head) // size * size
        body = order[head : head + whole]
        batches = [
            row
            for start in range(0, whole, self.window * size)
            for row in self._by_length(body[start : start + self.window * size]).reshape(-1, size)
        ]
        shuffled = [batches[i] for i in rng.permutation(len(batches))]
        return np.concatenate([order[:head], *shuffled, order[head + whole :]])

    def _by_length(self, indices: np.ndarray) -> np.ndarray:
        return indices[np.argsort(self.lengths[indices], kind="stable")]


def validation_batches(
    lengths: Sequence[int], *, micro_batch_size: int, world_size: int = 1, rank: int = 0
) -> list[list[Row]]:
    """Return one rank's micro-batches of one pass over all samples, epoch 0, longest first, one sample a row.

    Every rank has the same number of them, and every one is full: fillers complete the last.
    """
    ordered = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    entries = [Entry(i, 0) for i in ordered]
    missing = -len(entries) % (micro_batch_size * world_size)
    entries += [Entry(ordered[-1], 0, counted=False)] * missing if ordered else []
    return _deal([(entry,) for entry in entries], micro_batch_size, world_size, rank)


def pack(lengths: Sequence[int], entries: Sequence[Entry], room: int) -> list[Row]:
    """Put entries of ``lengths`` tokens, longest first, each into the first row that has room (first-fit decreasing).

    Returns the rows, those with most tokens first.
    """
    rows: list[list[Entry]] = []
    free: list[int] = []
    for length, entry in zip(lengths, entries, strict=True):
        place = next((i for i, left in enumerate(free) if left >= length), len(rows))
        if place == len(rows):
            rows.append([])
            free.append(room)
        rows[place].append(entry)
        free[place] -= length
    return [tuple(rows[i]) for i in sorted(range(len(rows)), key=free.__getitem__)]


def _deal(rows: list[Row], micro: int, world: int, rank: int) -> list[list[Row]]:
    """Cut sorted rows into micro-batches and take one a slot; every second slot runs backwards, to balance ranks."""
    dealt = []
    for slot, start in enumerate(range(0, len(rows), micro * world)):
        place = start + micro * (rank if slot % 2 == 0 else world - 1 - rank)
        dealt.append(rows[place : place + micro])
    return dealt
