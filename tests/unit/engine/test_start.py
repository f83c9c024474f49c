"""Which batches a fitted start looks at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepspec.contracts import Batch
from deepspec.engine import start
from tests.unit.drafters.small import row


def batches(*lengths: int) -> list[Batch]:
    return [replace(row(length, [3])[0], sample_ids=(f"s{i}",)) for i, length in enumerate(lengths)]


def test_enough_samples_and_no_more() -> None:
    given = batches(8, 8, 8, 8)
    assert [b.sample_ids for b in start._first(iter(given), 3)] == [("s0",), ("s1",), ("s2",)]
    assert len(list(start._first(iter(given), 9))) == 4


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the samples are; the first batch is always taken."""
    monkeypatch.setattr(start, "MAX_POSITIONS", 20)
    assert len(list(start._first(iter(batches(8, 8, 8)), 3))) == 2
    assert len(list(start._first(iter(batches(64, 8)), 2))) == 1
