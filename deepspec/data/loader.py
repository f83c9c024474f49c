"""Micro-batches of one rank, step by step, made ahead of time by one background thread.

When making a batch fails, the steps before it are still delivered and then that very error is raised where the loop
asks for the next step: training can neither go on with an old batch nor wait for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from deepspec.contracts import Batch, Sample
from deepspec.data.anchors import draw_anchors
from deepspec.data.collate import Document, collate
from deepspec.data.sampler import BatchPlan, Entry, Row

_Item = tuple[int, list[Batch]] | BaseException | None


class BatchMaker:
    """Turns the rows of a plan into batches."""

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        seed: int,
        anchors_per_sample: int,
        anchor_share: float | None = None,
        pad_id: int = 0,
    ) -> None:
        """Draw anchors from (``seed``, epoch, sample id), at most as many as ``draw_anchors`` says of the other two."""
        self.samples = samples
        self.seed = seed
        self.anchors_per_sample = anchors_per_sample
        self.anchor_share = anchor_share
        self.pad_id = pad_id

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Return one micro-batch."""
        return collate([[self._document(entry) for entry in row] for row in rows], self.pad_id)

    def _document(self, entry: Entry) -> Document:
        sample = self.samples[entry.index]
        if not entry.counted:
            return Document(sample, ())
        limits = (self.anchors_per_sample, self.anchor_share)
        return Document(sample, draw_anchors(sample.loss_mask, self.seed, entry.epoch, sample.id, *limits))


class BatchLoader:
    """Iterates over (step, micro-batches of this rank) for the steps ``start .. stop-1``."""

    def __init__(
        self, make: BatchMaker, plan: BatchPlan, *, start: int, stop: int, rank: int = 0, prefetch: int = 2
    ) -> None:
        """Prepare ``prefetch`` steps ahead."""
        self.make = make
        self.plan = plan
        self.start = start
        self.stop = stop
        self.rank = rank
        self.prefetch = prefetch

    def __iter__(self) -> Iterator[tuple[int, list[Batch]]]:
        items: queue.Queue[_Item] = queue.Queue(maxsize=self.prefetch)
        stopped = threading.Event()
        worker = threading.Thread(target=self._fill, args=(items, stopped), name="batch-loader", daemon=True)
        worker.start()
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            with suppress(queue.Empty):
                items.get_nowait()  # frees a worker that waits to hand over a step
            worker.join(timeout=10)

    def _fill(self, items: queue.Queue[_Item], stopped: threading.Event) -> None:
        try:
            for step in range(self.start, self.stop):
                batches = [self.make(rows) for rows in self.plan.micro_batches(step, self.rank)]
                if not _put(items, (step, batches), stopped):
                    return
            _put(items, None, stopped)
        except BaseException as error:  # noqa: BLE001 - raised again by the consumer
            _put(items, error, stopped)


def _put(items: queue.Queue[_Item], item: _Item, stopped: threading.Event) -> bool:
    """Hand an item over; give up, and say so, when nobody wants it any more."""
    while not stopped.is_set():
        with suppress(queue.Full):
            items.put(item, timeout=0.1)
            return True
    return False
