"""Weights of another drafter: what is taken, what is not, and that both are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.files import save_drafter
from deepspec.drafters.mtp.config import MTPConfig
from deepspec.engine.warm_start import warm_start
from deepspec.errors import ConfigError, PackageError
from deepspec.export.package import native_package, staged, write_package
from deepspec.targets.target import Target
from tests.unit.export.tiny import LAYER_IDS, MASK_ID, make_drafter, make_target


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture
def dflash(tmp_path: Path, target: Target) -> tuple[Path, Any]:
    made, config = make_drafter(target, config=DFlashConfig(num_layers=2, gamma=4))
    save_drafter(tmp_path, made, config, target.info)
    return tmp_path, made


def dspark(target: Target, layer_ids: tuple[int, ...] = LAYER_IDS, **over: Any) -> Any:
    config = DSparkConfig(**{"num_layers": 3, "gamma": 5, "markov_rank": 8} | over)
    return config.build(target.info, layer_ids, MASK_ID)


def test_a_dspark_takes_over_the_backbone_of_a_dflash(dflash: tuple[Path, Any], target: Target) -> None:
    folder, source = dflash
    made = dspark(target)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    lines = warm_start(made, str(folder), target)
    theirs = source.state_dict()
    for name, value in made.state_dict().items():
        assert value.equal(theirs[name] if name in theirs else before[name]), name
    assert lines == [
        f"from the DFlashDrafter in {folder}: fc, hidden_norm, layers.0, layers.1, norm",
        "as drafter.init says, for the source has no such tensor: layers.2, markov_head, confidence_head",
    ]


def test_another_shape_and_tensors_without_a_place_are_named(dflash: tuple[Path, Any], target: Target) -> None:
    made = dspark(target, num_layers=1, intermediate_size=24)
    lines = warm_start(made, str(dflash[0]), target)
    assert lines[2] == "as drafter.init says, for their shape is another: layers.0"
    assert lines[3] == "left out, for this drafter has no such tensor: layers.1"


def test_a_package_is_a_source(tmp_path: Path, target: Target) -> None:
    source, config = make_drafter(target)
    with staged(tmp_path / "package") as folder:
        write_package(folder, *native_package(source, config, target.info, "fp16_int8"))
    made = dspark(target, num_layers=2, gamma=4)
    assert len(warm_start(made, str(tmp_path / "package"), target)) == 1
    for (name, value), wanted in zip(made.state_dict().items(), source.state_dict().values(), strict=True):
        assert (value - wanted).norm() <= 0.02 * wanted.norm() + 1e-6, name


def test_other_layers_of_the_target_are_refused(dflash: tuple[Path, Any], target: Target) -> None:
    with pytest.raises(ConfigError, match=r"set target\.target_layer_ids=\[1,2,4\]"):
        warm_start(dspark(target, layer_ids=(0, 2, 4)), str(dflash[0]), target)


def test_a_drafter_with_nothing_in_common_is_refused(tmp_path: Path, target: Target) -> None:
    other = make_target(hidden_size=48)
    source, config = make_drafter(other, config=MTPConfig())
    save_drafter(tmp_path, source, config, other.info)
    with pytest.raises(PackageError):
        warm_start(dspark(target), str(tmp_path), target)
    with pytest.raises(PackageError, match="checkpoint"):
        warm_start(dspark(target), str(tmp_path / "none"), target)
