"""What a run reads depends on the seed of its data, not on that of its weights."""

from __future__ import annotations

from typing import Any

import pytest

from deepspec.config.compose import compose_run
from deepspec.engine.inputs import read_inputs
from deepspec.targets.target import Target
from tests.commands.tiny_run import overrides
from tests.helpers import tiny_target
from tests.unit.engine.toy import ONE_RANK


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*overrides(tmp_path_factory.mktemp("tiny")), "data.anchors_per_sample=3"]


def read(target: Target, *arguments: str) -> list[Any]:
    """Return the samples and anchors of four steps, and of the batches that a fit would look at."""
    inputs = read_inputs(compose_run(list(arguments)), target, ONE_RANK)
    steps = [micro for (_, batches), _ in zip(inputs.batches(0), range(4), strict=False) for micro in batches]
    return [(b.sample_ids, b.anchor_indices.tolist()) for b in (*steps, *inputs.first_batches(2))]


def test_one_seed_for_the_data_and_one_for_the_weights(arguments: list[str]) -> None:
    target = tiny_target()
    first = read(target, *arguments, "seed=0")
    assert read(target, *arguments, "seed=1", "data.seed=0") == first
    second = read(target, *arguments, "seed=1")
    assert [samples for samples, _ in second] != [samples for samples, _ in first]
    assert read(target, *arguments, "seed=0", "data.seed=1") == second
