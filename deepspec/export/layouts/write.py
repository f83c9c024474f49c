"""Write the folder of a layout, read it back, and ask the conformance tables what its consumers make of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from deepspec.drafters.files import check_inside, read_header, read_tensors
from deepspec.errors import PackageError
from deepspec.export.conformance.check import Report, check, check_values
from deepspec.export.conformance.folder import Folder
from deepspec.export.shards import SHARD_BYTES, save_weights
from deepspec.inference.package_checks import file_digest
from deepspec.inference.package_config import CHECKSUMS, CONFIG, INDEX, WEIGHTS
from deepspec.inference.strict_json import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.files import TensorKind
    from deepspec.export.layouts.common import LayoutFiles


def write_files(folder: Path, files: LayoutFiles, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config, weights and more JSON files into ``folder``; weights are sharded above ``shard_bytes``."""
    write_extras(folder, {CONFIG: files.config, **files.extras})
    save_weights(folder, files.tensors, shard_bytes=shard_bytes)


def write_extras(folder: Path, extras: Mapping[str, Any]) -> None:
    """Write JSON files by name."""
    for name, value in extras.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_checksums(folder: Path) -> None:
    """Write the sha256 of every file of the folder."""
    digests = {p.name: file_digest(p) for p in sorted(folder.iterdir()) if p.name != CHECKSUMS}
    (folder / CHECKSUMS).write_text(json.dumps({"sha256": digests}, indent=2) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights: one, or those that the index names.

    Raises:
        PackageError: there is none, or the index names something outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise PackageError(f"{folder} holds neither {WEIGHTS} nor {INDEX}: give the folder of a checkpoint")
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PackageError(f"{folder / INDEX} has no weight_map")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        check_inside(folder, name, INDEX)
    return [folder / name for name in names]


def read_kinds(folder: Path) -> dict[str, TensorKind]:
    """Return shape and type of every tensor, from the headers alone."""
    return {name: kind for path in weight_files(folder) for name, kind in read_header(path).items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the folder."""
    return {name: tensor for path in weight_files(folder) for name, tensor in read_tensors(path).items()}


def read_folder(path: Path, target: TargetInfo | None = None, served_dtype: str | None = None) -> Folder:
    """Return a folder as the conformance tables look at it."""
    config: dict[str, Any] = read_json(path, CONFIG)
    files = frozenset(p.name for p in path.iterdir())
    return Folder(config, read_kinds(path), target, served_dtype, files)


def conformance(path: Path, consumers: tuple[str, ...], target: TargetInfo, served_dtype: str) -> list[Report]:
    """Read a folder from disk and return what every consumer makes of it.

    Raises:
        PackageError: the weights hold values that no drafter has.
    """
    folder = read_folder(path, target, served_dtype)
    check_values(read_weights(path), target.vocab_size)
    return [check(folder, consumer) for consumer in consumers]


def require_conformance(reports: list[Report], *, all_of_them: bool) -> None:
    """Refuse a folder that a consumer cannot load: any of them, or every one.

    Raises:
        PackageError: with each consumer's reasons.
    """
    failed = [report for report in reports if not report.conforms]
    if failed and (all_of_them or len(failed) == len(reports)):
        raise PackageError(
            "the folder was not written:\n"
            + "\n".join(f"  - {problem}" for report in failed for problem in report.problems)
            + "\nexport.consumer=[...] says who has to load it; export.layout chooses another layout"
        )
