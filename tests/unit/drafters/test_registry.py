"""Drafters are found by name, and their configurations survive a file."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.registry import config_class, drafter_from_dict, drafter_to_dict
from deepspec.errors import ConfigError


@dataclass(frozen=True)
class OutsideConfig:
    gamma: int = 3

    def problems(self) -> list[str]:
        return []

    def build(self, *_: object) -> None:
        return None


def test_by_folder_name_and_by_dotted_path() -> None:
    assert config_class("dspark") is DSparkConfig
    assert config_class("deepspec.drafters.dspark.config.DSparkConfig") is DSparkConfig
    assert config_class(f"{__name__}.OutsideConfig") is OutsideConfig


@pytest.mark.parametrize("name", ["unheard_of", "nowhere.at.All", "deepspec.errors.DataError", "deepspec.log.Nothing"])
def test_what_is_no_drafter_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="drafter._target_"):
        config_class(name)


@pytest.mark.parametrize("config", [DSparkConfig(gamma=3, sliding_window=64), OutsideConfig(5)])
def test_round_trip_through_json(config: DSparkConfig | OutsideConfig) -> None:
    assert drafter_from_dict(json.loads(json.dumps(drafter_to_dict(config)))) == config  # type: ignore[arg-type]


def test_unknown_and_missing_keys_are_named() -> None:
    values = drafter_to_dict(DSparkConfig())
    with pytest.raises(ConfigError, match=r"drafter\.gama is not a key.*\n.*drafter\.depth"):
        drafter_from_dict(values | {"gama": 3, "depth": 2})
    with pytest.raises(ConfigError, match="_target_ is missing"):
        drafter_from_dict({"gamma": 3})


def test_the_defaults_are_right_and_every_mistake_is_reported() -> None:
    assert DSparkConfig().problems() == []
    wrong = DSparkConfig(
        num_layers=0, gamma=0, markov_head="none", sliding_window=1, init="zero", l1=-1.0, decay=0.0  # type: ignore[arg-type]
    )  # fmt: skip
    keys = ["num_layers", "gamma", "sliding_window", "init", "confidence_with_markov", "l1", "decay"]
    found = wrong.problems()
    assert len(found) == len(keys)
    assert all(any(f"drafter.{key}" in line for line in found) for key in keys)
