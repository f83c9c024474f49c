"""The same samples give the same gradient and the same update however they are split, in every engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.numerics.launch import start_ranks

GRADIENT, UPDATE = 2e-6, 1e-4  # relative L2 in fp32: only the order of summation differs
ALL = ("plain", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def check(measured: dict[str, dict[str, float]], engines: tuple[str, ...]) -> None:
    good = {name: values for name, values in measured.items() if not name.startswith("fault")}
    assert len(good) == 2 * len(engines)
    for name, values in good.items():
        for what, distance in values.items():
            limit = UPDATE if what.endswith("update") else GRADIENT
            assert distance <= limit, f"{name}: {what} is off by {distance:.2e}"


def run(folder: Path, world_size: int, engines: tuple[str, ...]) -> dict[str, dict[str, float]]:
    out = folder / "measured.json"
    codes = start_ranks("tests.numerics.splits_worker", str(out), *engines, world_size=world_size)
    assert codes == [0] * world_size
    measured: dict[str, dict[str, float]] = json.loads(out.read_text())
    return measured


def test_two_ranks(tmp_path: Path) -> None:
    """Pitfalls 16, 17 and 18: one rank without a supervised token, micro-batches of 0, 1, 2 and 6, clipping."""
    measured = run(tmp_path, 2, ALL)
    check(measured, ALL)
    for fault in ("fault rank", "fault micro"):
        assert measured[fault]["gradient"] > 1e3 * GRADIENT, f"{fault} went unnoticed"
        assert measured[fault]["update"] > 10 * UPDATE, f"{fault} went unnoticed"


@pytest.mark.slow
def test_one_rank(tmp_path: Path) -> None:
    check(run(tmp_path, 1, ALL), ALL)
