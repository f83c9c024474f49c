"""The tensors of a package: one safetensors file, or several with an index that says which holds what.

Names of files come out of the index, so they are checked to be ``model-00001-of-0000N.safetensors`` beside it, all N of
them; and each file holds the tensors that the index gives to it, no others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from deepspec.drafters.files import check_inside, read_header
from deepspec.errors import PackageError
from deepspec.inference.package_config import CONFIG, INDEX, WEIGHTS, PackageConfig
from deepspec.inference.strict_json import build, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from deepspec.drafters.files import TensorKind

SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")

MAX_SHARDS = 9999


@dataclass(frozen=True)
class IndexMetadata:
    """What an index says of all tensors together."""

    total_size: int  # bytes


@dataclass(frozen=True)
class Index:
    """The contents of ``model.safetensors.index.json``, in the form that Hugging Face's libraries write."""

    metadata: IndexMetadata
    weight_map: Mapping[str, object]  # file of each tensor


class StoredWeights:
    """The files of a package's tensors, and what is in them."""

    def __init__(self, folder: Path, config: PackageConfig) -> None:
        """Find the files that ``config`` speaks of.

        Raises:
            PackageError: the index is missing, is none, or names what cannot be a file of this package.
        """
        if config.weights == INDEX and not (folder / INDEX).is_file():
            raise PackageError(f"{CONFIG}: weights={INDEX!r}, but {folder / INDEX} is missing")
        self._folder = folder
        self._index = build(Index, read_json(folder, INDEX), INDEX) if config.weights == INDEX else None
        self.files = (WEIGHTS,) if self._index is None else _shards(folder, self._index)

    def metadata(self) -> Iterator[tuple[Path, Mapping[str, str]]]:
        """Yield each file with what its header says beside the tensors."""
        for path in self._paths():
            with _opened(path) as file:
                yield path, file.metadata() or {}

    def kinds(self) -> dict[str, TensorKind]:
        """Return shape and type of every tensor, from the headers alone.

        Raises:
            PackageError: index and files disagree.
        """
        found: dict[str, TensorKind] = {}
        for path in self._paths():
            header = read_header(path)
            self._check_place(path.name, header)
            found |= header
        self._check_size(found)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor, on the CPU."""
        found: dict[str, Tensor] = {}
        for path in self._paths():
            with _opened(path) as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}
        return found

    def _paths(self) -> list[Path]:
        return [self._folder / name for name in self.files]

    def _check_place(self, file: str, header: Mapping[str, TensorKind]) -> None:
        if self._index is None:
            return
        stated = {name for name, place in self._index.weight_map.items() if place == file}
        problems = [f"{INDEX}: tensor {name} is not in {file}" for name in sorted(stated - set(header))]
        problems += [
            f"{INDEX}: tensor {name} is in {file}, which it does not say" for name in sorted(set(header) - stated)
        ]
        if problems:
            raise PackageError("\n".join(problems))

    def _check_size(self, found: Mapping[str, TensorKind]) -> None:
        if self._index is None:
            return
        stated, size = self._index.metadata.total_size, sum(_bytes(kind) for kind in found.values())
        if stated != size:
            raise PackageError(f"{INDEX}: metadata.total_size={stated}, the tensors have {size} bytes")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; errors name it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from error


def _shards(folder: Path, index: Index) -> tuple[str, ...]:
    for tensor, name in index.weight_map.items():
        if not isinstance(name, str) or not SHARD.fullmatch(name):
            raise PackageError(
                f"{INDEX}: weight_map.{tensor}={name!r} is not a name like model-00001-of-00002.safetensors"
            )
        check_inside(folder, name, INDEX)
    named = sorted(set(map(str, index.weight_map.values())))
    count = int(named[-1].removesuffix(".safetensors").rpartition("-")[2]) if named else 0
    if count > MAX_SHARDS:
        raise PackageError(f"{INDEX}: weight_map names one of {count} files; a package has {MAX_SHARDS} at most")
    wanted = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    strange = [name for name in named if name not in wanted]
    if strange or not wanted:
        raise PackageError(f"{INDEX}: weight_map names {', '.join(strange) or 'no file'}, not one of {count} files")
    return tuple(wanted)


def _bytes(kind: TensorKind) -> int:
    shape, name = kind
    return math.prod(shape) * getattr(torch, name).itemsize if hasattr(torch, name) else 0
