"""The same samples give the same gradient and the same update however they are split, in every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.numerics.conftest import FAST_ENGINES
from tests.numerics.launch import start_ranks

GRADIENT, UPDATE = 2e-6, 1e-4  # relative L2 in fp32: only the order of summation differs


def check(measured: dict[str, dict[str, float]], engines: tuple[str, ...]) -> None:
    good = {name: values for name, values in measured.items() if not name.startswith("fault")}
    assert len(good) == 3 * len(engines)
    for name, values in good.items():
        for what, distance in values.items():
            limit = UPDATE if what.endswith("update") else GRADIENT
            assert distance <= limit, f"{name}: {what} is off by {distance:.2e}"


@pytest.mark.timeout(600)
def test_two_ranks(two_ranks: Path) -> None:
    """Ranks with 1 and 8 supervised tokens, micro-batches with 0, 1, 2 and 6; clipping by the norm over all shards.

    Then a rank without any supervised token: the others train on as if its samples were absent.
    """
    measured = json.loads((two_ranks / "measured.json").read_text())
    check(measured, FAST_ENGINES)
    for fault in ("fault rank", "fault micro"):
        assert measured[fault]["gradient"] > 1e3 * GRADIENT, f"{fault} went unnoticed"
        assert measured[fault]["update"] > 10 * UPDATE, f"{fault} went unnoticed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_rank(tmp_path: Path) -> None:
    """The same splits of one rank, and micro-batches without any supervised token."""
    out = tmp_path / "measured.json"
    assert start_ranks("tests.numerics.splits_worker", str(out), *FAST_ENGINES, world_size=1) == [0]
    check(json.loads(out.read_text()), FAST_ENGINES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_drafter_on_two_ranks(tmp_path: Path) -> None:
    """Layers that run several times in a forward pass, and matrices lent to the loss, are gathered where used."""
    out = tmp_path / "measured.json"
    assert start_ranks("tests.numerics.drafters_worker", str(out), world_size=2) == [0, 0]
    measured = json.loads(out.read_text())
    assert len(measured) == 28
    for name, distance in measured.items():
        assert distance <= GRADIENT, f"{name}: the gradient is off by {distance:.2e}"
