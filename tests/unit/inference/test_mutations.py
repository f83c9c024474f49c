"""Every change of a package is refused with a message that names it.

Checksums are renewed after each change, so that the structure has to catch it; where nothing but the bytes of numbers
changed (a flipped one, a transposed square) the checksum catches it, and stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.errors import PackageError
from deepspec.export.package import write_checksums
from deepspec.inference.package import load_package
from deepspec.inference.package_config import CALIBRATION, CONFIG, INDEX, SELFCHECK
from deepspec.targets.target import Target
from tests.unit.export.tiny import copy_package, edit_tensors, make_package, make_target

Key = tuple[str | int, ...]
Edit = Callable[[Any], object]

AT_LEAST = {CONFIG: 190, CALIBRATION: 60, SELFCHECK: 15, INDEX: 60, "tensors": 140, "bytes": 30, "squares": 2}
"""Changes of each kind that have to be made; this is what "every" means below."""


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target(tie_word_embeddings=False, head_dim=8)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    folder = tmp_path_factory.mktemp("packages") / "whole"
    return make_package(folder, "fp16_int8", target, include_embeddings=True, whole=True, num_layers=1)


def refused(package: Path, target: Target, name: str, what: str) -> None:
    with pytest.raises(PackageError) as error:
        load_package(package, target)
    said = str(error.value).replace(str(package), "")  # the folder's own name says nothing
    assert name in said, f"{what}: {said}"


def test_the_package_itself_loads(package: Path, target: Target) -> None:
    drafter = load_package(package, target, self_check=True)
    assert drafter.confidence_temperatures == (0.5, 0.75, 1.0, 1.25)
    assert sum(AT_LEAST.values()) > 450


# ---- JSON files, key by key


def keys(value: Any, path: Key = ()) -> Iterator[Key]:
    """Yield the path of every key, also of those of objects in lists."""
    if isinstance(value, dict):
        for key in value:
            yield (*path, key)
            yield from keys(value[key], (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield from keys(item, (*path, index))


def at(value: Any, path: Key) -> Any:
    for key in path:
        value = value[key]
    return value


def put(path: Key, new: Any) -> Edit:
    return lambda whole: at(whole, path[:-1]).__setitem__(path[-1], new)


def changes(whole: Any) -> Iterator[tuple[str, Key, Edit]]:
    """Yield every key removed, null, of a wrong type, and shifted by one or turned round where that makes sense."""
    for path in keys(whole):
        value = at(whole, path)
        yield "removed", path, lambda w, p=path: at(w, p[:-1]).pop(p[-1])  # type: ignore[misc]
        if value is not None:
            yield "null", path, put(path, None)
        yield "wrong type", path, put(path, 3.5 if isinstance(value, str) else "wrong")
        if isinstance(value, bool):
            yield "turned", path, put(path, not value)
        elif isinstance(value, int | float):
            yield "shifted", path, put(path, value + 1)
        elif isinstance(value, list) and any(isinstance(item, int | float) for item in value):
            yield "shifted", path, put(path, [item if item is None else item + 1 for item in value])
            yield "shortened", path, put(path, value[:-1])


@pytest.mark.parametrize("name", [CONFIG, CALIBRATION, SELFCHECK])
def test_every_change_of_a_json_file_is_refused_by_name(
    package: Path, target: Target, tmp_path: Path, name: str
) -> None:
    copy = copy_package(package, tmp_path / "copy")
    every_change(copy, target, name)


def test_every_change_of_the_index_is_refused_by_name(tmp_path: Path, target: Target) -> None:
    copy = make_package(tmp_path / "p", "fp16_int8", target, whole=True, num_layers=1, shard_bytes=4_000)
    assert len(list(copy.glob("model-*-of-*.safetensors"))) >= 3
    assert load_package(copy, target, self_check=True).confidence_temperatures
    every_change(copy, target, INDEX)


def every_change(copy: Path, target: Target, file: str) -> None:
    original, count = (copy / file).read_text(), 0
    for what, path, edit in changes(json.loads(original)):
        changed = json.loads(original)
        edit(changed)
        (copy / file).write_text(json.dumps(changed))
        write_checksums(copy)
        named = next(key for key in reversed(path) if isinstance(key, str))
        refused(copy, target, named, f"{file}: {what} {path}")
        count += 1
    assert count >= AT_LEAST[file]


# ---- tensors


def tensor_changes(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, Edit]]:
    for name, tensor in tensors.items():
        yield "dropped", name, lambda t, n=name: t.pop(n)  # type: ignore[misc]
        yield "renamed", name, lambda t, n=name: t.update({f"model.{n}": t.pop(n)})  # type: ignore[misc]
        wider = torch.cat((tensor, tensor[:1]))
        yield "longer", name, lambda t, n=name, w=wider: t.update({n: w})  # type: ignore[misc]
        other = torch.bfloat16 if tensor.dtype != torch.bfloat16 else torch.float32
        yield "cast", name, lambda t, n=name, o=other: t.update({n: t[n].to(o)})  # type: ignore[misc]
        if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
            yield "transposed", name, lambda t, n=name: t.update({n: t[n].T})  # type: ignore[misc]
        if tensor.is_floating_point():
            yield "NaN", name, lambda t, n=name: t[n].view(-1)[-1:].fill_(float("nan"))  # type: ignore[misc]


def test_every_change_of_a_tensor_is_refused_by_name(package: Path, target: Target, tmp_path: Path) -> None:
    copy = copy_package(package, tmp_path / "copy")
    tensors: dict[str, torch.Tensor] = {}
    edit_tensors(copy, tensors.update)
    original, count = (copy / "model.safetensors").read_bytes(), 0
    for what, name, edit in tensor_changes(tensors):
        edit_tensors(copy, edit)
        refused(copy, target, name, what)
        (copy / "model.safetensors").write_bytes(original)
        count += 1
    assert count >= AT_LEAST["tensors"]


def test_a_flipped_byte_of_any_tensor_or_file_is_refused(package: Path, target: Target, tmp_path: Path) -> None:
    copy = copy_package(package, tmp_path / "copy")
    count = 0
    for name, place in byte_places(copy):
        original = (copy / name).read_bytes()
        damaged = bytearray(original)
        damaged[place] ^= 1
        (copy / name).write_bytes(damaged)
        refused(copy, target, f"{name} is damaged or was changed", f"{name}, byte {place}")
        (copy / name).write_bytes(original)
        count += 1
    assert count >= AT_LEAST["bytes"]


def byte_places(package: Path) -> Iterator[tuple[str, int]]:
    """Yield a byte in the middle of every tensor, of the header, and of each JSON file."""
    data = (package / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            yield "model.safetensors", start + (first + last) // 2
    yield "model.safetensors", start // 2
    for name in (CONFIG, CALIBRATION, SELFCHECK):
        yield name, (package / name).stat().st_size // 2


def test_a_transposed_square_is_caught_by_the_checksum(package: Path, target: Target, tmp_path: Path) -> None:
    copy = copy_package(package, tmp_path / "copy")
    checksums, original = (copy / "checksums.json").read_text(), (copy / "model.safetensors").read_bytes()
    tensors: dict[str, torch.Tensor] = {}
    edit_tensors(copy, tensors.update)
    squares = [name for name, t in tensors.items() if t.ndim == 2 and t.shape[0] == t.shape[1] > 1]
    for name in squares:
        (copy / "model.safetensors").write_bytes(original)
        edit_tensors(copy, lambda t, n=name: t.update({n: t[n].T}))  # type: ignore[misc]
        (copy / "checksums.json").write_text(checksums)
        refused(copy, target, "model.safetensors is damaged", name)
    assert len(squares) >= AT_LEAST["squares"]
