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
from tests.unit.drafters import small
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
    with pytest.raises(PackageError, match=r"tensor up\.weight is missing\ntensor up2\.weight is unknown"):
        load_drafter(folder)


def test_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"up.weight": torch.zeros(12, 24)}))
    with pytest.raises(PackageError, match=r"up\.weight has shape \[12, 24\], the config asks for \[12, 8\]"):
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
    with pytest.raises(PackageError, match="gamma=5 contradicts the drafter section, which builds 2"):
        load_drafter(folder)


def test_wrong_type(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"up.weight": t["up.weight"].half()}))
    with pytest.raises(PackageError, match=r"up\.weight has type float16, the config asks for float32"):
        load_drafter(folder)


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    made = small.drafter(draft_vocab_size=30)
    made.set_vocabulary(range(0, 60, 2))
    save_drafter(tmp_path, made, made.config, made.target)
    return tmp_path


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        ("drafter", {"num_layers": 100_000}, "num_layers=100000 is more than its weights have tensors"),
        ("drafter", {"num_layers": 3}, "layers.2.mlp.up_proj.weight is missing"),
        ("drafter", {"num_layers": 0}, "num_layers=0 must be at least 1"),
        ("drafter", {"num_layers": "2"}, "drafter: "),
        ("drafter", {"markov_rank": 10**12}, "markov_w1.weight has shape"),
        ("drafter", {"intermediate_size": 10**12}, "up_proj.weight has shape"),
        ("target", {"vocab_size": 10**12}, "markov_w1.weight has shape"),
        ("target", {"hidden_size": 10**7}, "fc.weight has shape"),
        ("target", {"hidden_size": "x"}, "cannot be built"),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(
    reduced: Path, monkeypatch: pytest.MonkeyPatch, section: str, change: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("deepspec.drafters.files.load_file", lambda *_: pytest.fail("read the tensors"))
    edit_json(reduced, lambda d: d[section].update(change))
    with pytest.raises(PackageError, match=says):
        load_drafter(reduced)


@pytest.mark.parametrize(
    ("at", "token", "says"),
    [(-1, small.VOCAB, "token 97 is not in"), (0, -1, "token -1 is not in"), (3, 9, "ids must rise")],
)
def test_a_draft_vocabulary_beyond_the_targets(reduced: Path, at: int, token: int, says: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"][at] = token - at % 30

    edit_tensors(reduced, edit)
    with pytest.raises(PackageError, match=says):
        load_drafter(reduced)


def test_other_version_and_no_file(folder: Path, tmp_path: Path) -> None:
    edit_json(folder, lambda d: d.update(version=99))
    with pytest.raises(PackageError, match="99"):
        load_drafter(folder)
    with pytest.raises(PackageError, match="does not exist"):
        load_drafter(tmp_path / "nothing")
