"""Which samples make up which optimiser step, rank and micro-batch: a stateless plan.

The samples of all epochs form one endless stream, each epoch a permutation of its own, and step n takes the stream's
positions n*G .. (n+1)*G-1 (G: samples of a global batch). So

* every sample comes exactly once an epoch; the batch that an epoch leaves incomplete is filled by the next epoch, and
  only the last incomplete batch of a whole run is left out;
* the set of a step depends on (seed, step) alone, never on ranks or accumulation, and any step is computed directly.

Little padding: an epoch is shuffled, sorted by length inside windows of several global batches, cut into global
batches, and these are shuffled again. Inside a global batch, micro-batches take neighbours in length, and the ranks of
one slot get micro-batches of about the same length, the longest first.
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
    ) -> None:
        """Plan over samples of ``lengths`` tokens; ``window`` is the number of global batches sorted together.

        Raises:
            DataError: there is no sample.
            ConfigError: the global batch is no multiple of micro-batch times ranks.
        """
        if not lengths:
            raise DataError("there is no sample to train on; see data.train and data.max_length")
        if global_batch_size % (micro_batch_size * world_size):
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
        self._order = lru_cache(maxsize=4)(self._epoch_order)

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank runs in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

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

    def micro_batches(self, step: int, rank: int = 0) -> list[list[Entry]]:
        """Return the micro-batches of one rank in a step; every rank has ``accumulation`` of them."""
        return _deal(self.global_batch(step), self.micro_batch_size, self.world_size, rank)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch; its global batches begin where the stream's do."""
        size, num = self.global_batch_size, len(self.lengths)
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(num)
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
) -> list[list[Entry]]:
    """Return one rank's micro-batches of one pass over all samples, epoch 0, longest first.

    Every rank has the same number of them, and every one is full: fillers complete the last.
    """
    ordered = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    entries = [Entry(i, 0) for i in ordered]
    missing = -len(entries) % (micro_batch_size * world_size)
    entries += [Entry(ordered[-1], 0, counted=False)] * missing if ordered else []
    return _deal(entries, micro_batch_size, world_size, rank)


def _deal(entries: list[Entry], micro: int, world: int, rank: int) -> list[list[Entry]]:
    """Cut sorted entries into micro-batches and take one a slot; every second slot runs backwards, to balance ranks."""
    dealt = []
    for slot, start in enumerate(range(0, len(entries), micro * world)):
        place = start + micro * (rank if slot % 2 == 0 else world - 1 - rank)
        dealt.append(entries[place : place + micro])
    return dealt
