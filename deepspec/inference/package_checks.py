"""The checks that a package has to pass: its files, its target, and its tensors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepspec.drafters.files import (
    TensorKind,
    build_described,
    check_inside,
    check_num_layers,
    tensor_problems,
    type_name,
)
from deepspec.errors import PackageError
from deepspec.inference.package_config import (
    CHECKSUMS,
    CONFIG,
    HEADER_KEYS,
    OFFSETS,
    WEIGHTS,
    PackageConfig,
)
from deepspec.inference.package_embeddings import embedding_tensors
from deepspec.inference.profiles import SCALE, SCHEMES, matrices, membership_problems, width_problems
from deepspec.inference.strict_json import read_json, to_json
from deepspec.nn.vocabulary import id_problems, target_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.nn.head import FrozenHead

MAX_CHANGES = 8  # told of one file

REVISION = ("fingerprint", "max_position_embeddings", "rope_parameters")
"""What another revision of the same target may change; it is refused unless the caller allows it."""
STRUCTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "embed_scale",
    "logit_scale",
    "logit_softcap",
)
"""What makes a target unusable for the drafter when it differs."""


class BindableTarget(Protocol):
    """What a package needs of a target: ``targets.Target`` fits."""

    @property
    def info(self) -> TargetInfo:
        """Its plain values."""
        ...

    @property
    def head(self) -> FrozenHead:
        """Its frozen embedding and head."""
        ...


def check_files(folder: Path) -> tuple[str, ...]:
    """Compare every file that has a checksum with it, and return their names, which stay inside the folder."""
    if not folder.is_dir():
        raise PackageError(f"{folder} is not a folder; give a package that deepspec.export has written")
    stated = read_json(folder, CHECKSUMS)
    files = stated.get("sha256")
    if set(stated) != {"sha256"} or not isinstance(files, dict):
        raise PackageError(f"{folder / CHECKSUMS} must hold one object, sha256")
    for name, digest in files.items():
        check_inside(folder, name, CHECKSUMS)
        found = file_digest(folder / name)
        if found != digest:
            raise PackageError(f"{folder / name} is damaged or was changed: sha256 {found}, {CHECKSUMS} says {digest}")
    return tuple(files)


def check_named(folder: Path, checked: Collection[str], needed: Collection[str]) -> None:
    """Refuse a package with a file that was not compared with a checksum."""
    for name in needed:
        if not (folder / name).is_file():
            raise PackageError(f"{folder / name} is missing, and the package says that it has one")
        if name not in checked:
            raise PackageError(f"{folder / CHECKSUMS} has no checksum of {name}")


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PackageError(f"{path} cannot be read: {error}") from error


def check_target(
    trained_with: TargetInfo, target: BindableTarget, allow_other_target: bool = False, *, what: str = "the package"
) -> None:
    """Refuse a target that the drafter in ``what`` was not trained with."""
    ours, theirs = _plain(trained_with), _plain(target.info)
    different = [name for name in STRUCTURE if ours[name] != theirs[name]]
    if different:
        raise PackageError(f"{what} does not fit this target: {_differences(ours, theirs, different, what)}")
    shape = (trained_with.vocab_size, trained_with.hidden_size)
    for part, tensor in (("embedding", target.head.embedding), ("head", target.head.weight)):
        if tuple(tensor.shape) != shape:
            raise PackageError(f"the target's {part} is {list(tensor.shape)}, {what} needs {list(shape)}")
    revised = [name for name in REVISION if ours[name] != theirs[name]]
    if revised and not allow_other_target:
        raise PackageError(
            f"{what} was trained with another revision of {trained_with.name}: "
            f"{_differences(ours, theirs, revised, what)}. Use the target it was trained with; another one "
            "(allow_other_target=True) stays lossless, but fewer tokens are accepted"
        )


def check_headers(files: Mapping[str, Any], found: Iterable[tuple[Path, Mapping[str, str]]]) -> None:
    """Compare the JSON files of a package with their copies in the headers of the weights, key by key.

    Args:
        files: What was read of each (a dataclass), or None where the package has no such file.
        found: Each file of weights with its header's metadata.
    """
    for path, metadata in found:
        for name, value in files.items():
            _check_copy(name, None if value is None else to_json(value), metadata.get(HEADER_KEYS[name]), path)


def _check_copy(name: str, value: dict[str, Any] | None, text: str | None, path: Path) -> None:
    try:
        copy = None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path}: the header's copy of {name} cannot be read: {error}") from error
    if (value is None) != (copy is None):
        raise PackageError(f"{path}: {CONFIG} and the header disagree on whether there is a {name}")
    changed = list(islice(_changes(value, copy), MAX_CHANGES))
    if changed:
        raise PackageError(
            f"{name} was changed after the weights were written, their header disagrees: " + "; ".join(changed)
        )


def check_tensors(config: PackageConfig, drafter_config: DrafterConfig, found: Mapping[str, TensorKind]) -> None:
    """Compare the tensors of the files with those that the config needs; nothing is loaded for it."""
    check_num_layers(config.drafter, found, CONFIG)
    problems = tensor_problems(expected_tensors(config, drafter_config) | embedding_tensors(config), found)
    if problems:
        raise PackageError("\n".join(f"{WEIGHTS}: {problem}" for problem in problems))


def check_vocabulary(config: PackageConfig, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a reduced vocabulary whose tokens are not the target's, or not in rising order."""
    if OFFSETS in tensors:
        problems = id_problems(target_ids(tensors[OFFSETS]), config.vocab_size)
        if problems:
            raise PackageError("\n".join(f"{WEIGHTS}: tensor {OFFSETS}: {problem}" for problem in problems))


def expected_tensors(config: PackageConfig, drafter_config: DrafterConfig) -> dict[str, TensorKind]:
    """Return shape and type of every tensor of the drafter that the package must hold, from its config alone."""
    with torch.device("meta"):
        drafter = build_drafter(config, drafter_config)
    state = drafter.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _check_formats(config, drafter, shapes)
    groups = config.groups
    expected: dict[str, TensorKind] = {}
    for name, shape in shapes.items():
        group = groups.get(name)
        if group is None:
            floating = state[name].is_floating_point()
            expected[name] = (shape, config.dtype_of(name) if floating else type_name(state[name].dtype))
            continue
        scheme = SCHEMES[group.scheme]
        stored, scales = scheme.shapes(shape, group.group)
        expected[name], expected[f"{name}{SCALE}"] = (stored, scheme.stored), (scales, scheme.scale_dtype)
    return expected


def _check_formats(config: PackageConfig, drafter: Drafter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse number formats that name other tensors or modules than the drafter has for its profile."""
    problems = list(membership_problems(config.quantisation, config.profile, matrices(drafter)))
    modules = dict(drafter.named_modules())
    problems += [f"bfloat16.tensors names {n}, no tensor of it" for n in config.bfloat16.tensors if n not in shapes]
    problems += [f"bfloat16.states names {n}, no module of it" for n in config.bfloat16.states if n not in modules]
    problems = problems or width_problems(config.quantisation, shapes)
    if problems:
        raise PackageError("\n".join(f"{CONFIG}: {problem}" for problem in problems))


def build_drafter(config: PackageConfig, drafter_config: DrafterConfig) -> Drafter:
    """Build the drafter and compare its conventions with the package's."""
    return build_described(drafter_config, config.target, config.conventions, CONFIG)


def _changes(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            yield from _changes(ours.get(key), theirs.get(key), f"{where}.{key}" if where else key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _changes(own, other, f"{where}[{index}]")
    elif ours != theirs or type(ours) is not type(theirs):
        yield f"{where} is {ours!r}, was {theirs!r}"


def _plain(info: TargetInfo) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(info)))
    return plain


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: list[str], what: str) -> str:
    return "; ".join(f"{name} is {theirs[name]!r}, {what} says {ours[name]!r}" for name in names)
