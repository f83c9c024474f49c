"""The pair of files of a trained drafter: round trip, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspec.drafters.files import load_drafter, save_drafter
from deepspec.errors import PackageError
from tests.unit.engine import toy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_drafter(tmp_path, toy.make_drafter(), toy.ToyConfig(), toy.INFO, step=7)
    return tmp_path


def edit_json(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "drafter.json"
    description = json.loads(path.read_text())
    change(description)
    path.write_text(json.dumps(description))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "drafter.safetensors")
    change(tensors)
    save_file(tensors, folder / "drafter.safetensors")


def test_round_trip(folder: Path) -> None:
    drafter = load_drafter(folder)
    expected = toy.make_drafter()
    assert drafter.conventions == expected.conventions
    assert all(value.equal(expected.state_dict()[name]) for name, value in drafter.state_dict().items())


def test_renamed_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"up2.weight": t.pop("up.weight")}))
    with pytest.raises(PackageError, match=r"missing tensor up\.weight\nunknown tensor up2\.weight"):
        load_drafter(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"up.weight": torch.zeros(12, 24)}))
    with pytest.raises(PackageError, match=r"up\.weight has shape \[12, 24\], the drafter needs \[12, 8\]"):
        load_drafter(folder)


@pytest.mark.parametrize("name", ["block_layout", "gamma", "target_layer_ids", "mask_token_id", "is_causal"])
def test_missing_convention(folder: Path, name: str) -> None:
    edit_json(folder, lambda d: d["conventions"].pop(name))
    with pytest.raises(PackageError, match=f"conventions lack {name}"):
        load_drafter(folder)


@pytest.mark.parametrize("section", ["conventions", "target", "drafter"])
def test_missing_section(folder: Path, section: str) -> None:
    edit_json(folder, lambda d: d.pop(section))
    with pytest.raises(PackageError, match=section):
        load_drafter(folder)


def test_conventions_that_contradict_the_drafter(folder: Path) -> None:
    edit_json(folder, lambda d: d["conventions"].update(gamma=5))
    with pytest.raises(PackageError, match="do not match"):
        load_drafter(folder)


def test_other_version_and_no_file(folder: Path, tmp_path: Path) -> None:
    edit_json(folder, lambda d: d.update(version=99))
    with pytest.raises(PackageError, match="99"):
        load_drafter(folder)
    with pytest.raises(PackageError, match="does not exist"):
        load_drafter(tmp_path / "nothing")
