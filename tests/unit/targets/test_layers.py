from __future__ import annotations

import pytest

from deepspec.errors import ConfigError
from deepspec.targets import layers
from deepspec.targets.layers import auto_layer_ids, from_project, to_project, validate_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (30, (1, 8, 14, 20, 27)),
        (6, (1, 2, 3)),
        (4, (1,)),
        (2, (0,)),
    ],
)
def test_auto(num_layers: int, expected: tuple[int, ...]) -> None:
    assert auto_layer_ids(num_layers) == expected
    assert validate_layer_ids(expected, num_layers) == expected


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ((1, 35), "35 is the last of the target's 36 layers.*up to 34"),
        ((1, 36), "36 is not one of -1 .. 34"),
        ((-2, 1), "-2 is not one of"),
        ((9, 1), "rise strictly"),
        ((1, 1), "rise strictly"),
        ((), "no layer"),
    ],
)
def test_ids_that_cannot_be_served_are_refused(ids: tuple[int, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate_layer_ids(ids, 36)


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_layer_ids((40, 35), 36)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("project", "expected"),
    [
        ("transformers", (2, 10, 18)),
        ("vllm", (2, 10, 18)),
        ("speculators", (2, 10, 18)),
        ("sglang", (1, 9, 17)),
        ("published", (1, 9, 17)),
    ],
)
def test_conventions_of_other_projects(project: str, expected: tuple[int, ...]) -> None:
    assert to_project((1, 9, 17), project) == expected
    assert from_project(expected, project) == (1, 9, 17)


def test_named_conversions() -> None:
    named = (layers.to_hf, layers.to_vllm, layers.to_sglang, layers.to_speculators)
    assert [to((-1 + 1, 4)) for to in named] == [(1, 5), (1, 5), (0, 4), (1, 5)]
    assert layers.to_vllm((-1, 4)) == (0, 5)
    with pytest.raises(ConfigError, match="embedding"):
        layers.to_sglang((-1, 4))
