"""A package that an earlier commit wrote still loads, passes its self-check and decodes (``store_package.py``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspec.errors import PackageError
from deepspec.inference.api import TextModel, load
from deepspec.inference.package import load_package
from deepspec.inference.package_config import CONFIG, VERSION, read_config
from deepspec.inference.proposers import PlainProposer
from tests.unit.export.tiny import copy_package, edit_config
from tests.unit.inference.store_package import FOLDER, PACKAGE, TARGET


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load(PACKAGE, TARGET, device="cpu")


def test_it_loads_and_says_what_the_target_says(model: TextModel) -> None:
    plain = TextModel(model.target, PlainProposer(), {"quick": True})
    for prompt in ("red fish", "an old tree, a small cat"):
        answer = model.generate(prompt, max_new_tokens=24)
        assert answer.text == plain.generate(prompt, max_new_tokens=24).text
        assert "".join(model.stream(prompt, max_new_tokens=24)) == answer.text


def test_it_has_everything_that_a_package_can_have(model: TextModel) -> None:
    config = read_config(PACKAGE)
    assert (config.version, config.profile, config.gamma) == (VERSION, "fp16_int8", 3)
    assert (config.calibration, config.selfcheck) == ("calibration.json", "selfcheck.json")
    assert config.stored_embeddings is not None
    assert config.template_options == {"quick": True}
    temperatures = load_package(PACKAGE, model.target).confidence_temperatures
    assert temperatures is not None
    assert list(temperatures) == json.loads((PACKAGE / "calibration.json").read_text())["temperatures"]
    assert any(temperature != 1.0 for temperature in temperatures)


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 160_000


def test_the_first_version_of_packages_is_refused_by_name(model: TextModel, tmp_path: Path) -> None:
    old = copy_package(PACKAGE, tmp_path / "old")
    edit_config(old, lambda config: config.update(version=1))
    assert json.loads((old / CONFIG).read_text())["version"] == 1
    with pytest.raises(PackageError, match="version 1 cannot be read; this program reads 'deepspec-package' version 2"):
        load_package(old, model.target)
