"""Ten steps equal five, a kill -9, and five more, bit for bit; a checkpoint also fits another engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.conftest import FAST_CASES
from tests.numerics.launch import start_ranks
from tests.numerics.resume_worker import VOCABULARY
from tests.unit.engine import toy

LAST = "checkpoints/step-000010"
ENGINES = ("plain", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")


def resume(folder: Path, world_size: int, cases: Sequence[str]) -> None:
    codes = start_ranks("tests.numerics.resume_worker", "resume", str(folder), *cases, world_size=world_size)
    assert codes == [0] * world_size
    for case in cases:
        check(folder / case.replace(":", "_"), case)


def check(folder: Path, case: str) -> None:
    for file in ("drafter.safetensors", "optimizer.safetensors"):
        straight, resumed = load_file(folder / "straight" / LAST / file), load_file(folder / "killed" / LAST / file)
        assert straight.keys() == resumed.keys()
        if file == "drafter.safetensors":
            assert resumed["d2t"].equal(torch.tensor(VOCABULARY) - torch.arange(3)), f"{case}: another vocabulary"
        for name, value in straight.items():
            assert value.equal(resumed[name]), f"{case}: {name} differs after the resume"
    assert lines(folder / "straight") == lines(folder / "killed")
    if case.endswith("fp32"):
        straight = load_file(folder / "straight" / LAST / "drafter.safetensors")
        elastic = load_file(folder / "elastic" / LAST / "drafter.safetensors")
        assert toy.relative(toy.flat(elastic), toy.flat(straight)) < 1e-6


def lines(folder: Path) -> list[tuple[object, ...]]:
    """Return what the metrics say beside timings; a resumed run has every step exactly once."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == list(range(1, 11))
    return [tuple(line[key] for key in ("step", "samples", "lr", "loss", "grad_norm")) for line in found]


@pytest.mark.timeout(600)
def test_two_ranks(two_ranks: Path) -> None:
    resume(two_ranks, 2, FAST_CASES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_engine(tmp_path: Path, world_size: int, precision: str) -> None:
    cases = [f"{engine}:{precision}" for engine in ENGINES]
    codes = start_ranks("tests.numerics.resume_worker", "straight", str(tmp_path), *cases, world_size=world_size)
    assert all(code != 0 for code in codes), "the workers end by SIGKILL"
    resume(tmp_path, world_size, cases)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [1, 2])
def test_8_bit_adamw(tmp_path: Path, world_size: int) -> None:
    out = tmp_path / "same.json"
    assert start_ranks("tests.numerics.adamw8bit_worker", str(out), world_size=world_size) == [0] * world_size
    assert json.loads(out.read_text()) == {"plain": True, "deepspeed": True}
