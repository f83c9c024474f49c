"""The pair of files that holds a trained drafter: ``drafter.safetensors`` and ``drafter.json``.

The tensors are the fp32 master weights under the drafter's published names, and ``d2t`` (int64) for a reduced draft
vocabulary. The JSON says everything that is needed to read them: the drafter's configuration, the target's plain values
and the block conventions. Nothing is guessed when a field is missing; the file is refused.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from deepspec.contracts import Conventions, TargetInfo
from deepspec.drafters.registry import drafter_from_dict, drafter_to_dict
from deepspec.errors import ConfigError, DeepSpecError, PackageError
from deepspec.nn.vocabulary import id_problems, target_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from deepspec.drafters.base import Drafter, DrafterConfig

FORMAT = "deepspec-drafter"
VERSION = 1
TENSORS = "drafter.safetensors"
DESCRIPTION = "drafter.json"

TensorKind = tuple[tuple[int, ...], str]  # shape, type
_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

T = TypeVar("T", TargetInfo, Conventions)


def save_drafter(
    folder: Path,
    drafter: Drafter,
    config: DrafterConfig,
    info: TargetInfo,
    *,
    step: int = 0,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write the pair of files into ``folder``; ``tensors`` stands in for the drafter's own when they are sharded."""
    chosen = drafter.state_dict() if tensors is None else tensors
    whole = {name: value.detach().to("cpu", saved_dtype(value)).contiguous() for name, value in chosen.items()}
    save_file(whole, folder / TENSORS, metadata={"format": "pt"})
    description = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "drafter": drafter_to_dict(config),
        "target": asdict(info),
        "conventions": asdict(drafter.conventions),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def saved_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type that a tensor is saved in: fp32, integers as they are."""
    return torch.float32 if tensor.is_floating_point() else tensor.dtype


def load_drafter(folder: Path) -> Drafter:
    """Build the drafter that ``folder`` describes and load its weights; it is not bound to a target yet.

    Memory is taken for what the weights' header holds, once that is found to be what the description asks for.
    """
    where, path = str(folder / DESCRIPTION), folder / TENSORS
    description = read_description(folder)
    info, conventions = target_info(description, folder), read_conventions(description, folder)
    section = _field(description, "drafter", folder)
    config = read_drafter_config(section, where)
    found = read_header(path)
    check_num_layers(section, found, where)
    with torch.device("meta"):
        needed = build_described(config, info, conventions, where).state_dict()
    problems = tensor_problems(tensor_kinds({name: t.to(saved_dtype(t)) for name, t in needed.items()}), found)
    if problems:
        raise PackageError(f"{path} does not fit the drafter:\n" + "\n".join(problems))
    drafter = build_described(config, info, conventions, where)
    drafter.load_state_dict(read_tensors(path))
    if drafter.d2t is not None and (problems := id_problems(target_ids(drafter.d2t), info.vocab_size)):
        raise PackageError(f"{path}: the draft vocabulary (d2t) cannot be: " + "; ".join(problems))
    return drafter


def read_drafter_config(section: Mapping[str, Any], where: str) -> DrafterConfig:
    """Return the configuration that the drafter section of a file holds; ``where`` names the file in messages."""
    try:
        config = drafter_from_dict(section)
        problems = config.problems()
    except (ConfigError, TypeError, ValueError) as error:
        raise PackageError(f"{where}: drafter: {error}") from error
    if problems:
        raise PackageError("\n".join(f"{where}: {problem}" for problem in problems))
    return config


def build_described(config: DrafterConfig, info: TargetInfo, conventions: Conventions, where: str) -> Drafter:
    """Build a drafter and compare its conventions with those that its file says."""
    try:
        drafter = config.build(info, conventions.target_layer_ids, conventions.mask_token_id)
    except (ArithmeticError, DeepSpecError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise PackageError(f"{where}: the drafter cannot be built from it: {error}") from error
    for name, value in vars(conventions).items():
        built = getattr(drafter.conventions, name)
        if built != value:
            raise PackageError(f"{where}: {name}={value!r} contradicts the drafter section, which builds {built!r}")
    return drafter


def check_num_layers(section: Mapping[str, Any], tensors: Collection[str], where: str) -> None:
    """Refuse more layers than there are tensors before that many modules are built, even without memory of theirs."""
    layers = section.get("num_layers", 0)
    if isinstance(layers, int) and layers > len(tensors):
        raise PackageError(f"{where}: drafter.num_layers={layers} is more than its weights have tensors")


def read_description(folder: Path) -> dict[str, Any]:
    """Read and check ``drafter.json``."""
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PackageError(f"{path} does not exist; give a folder that training has written") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from error
    found = (description.get("format"), description.get("version")) if isinstance(description, dict) else None
    if found != (FORMAT, VERSION):
        raise PackageError(f"{path}: format and version are {found}, this program reads {(FORMAT, VERSION)}")
    return description


def target_info(description: Mapping[str, Any], folder: Path) -> TargetInfo:
    """Return the target's plain values from a description."""
    return _dataclass(TargetInfo, description, "target", folder)


def read_conventions(description: Mapping[str, Any], folder: Path) -> Conventions:
    """Return the block conventions; every field has to be there, also those that have a default in code."""
    section = _field(description, "conventions", folder)
    missing = sorted({f.name for f in fields(Conventions)} - set(section))
    if missing:
        raise PackageError(f"{folder / DESCRIPTION}: conventions lack {', '.join(missing)}; they cannot be guessed")
    return _dataclass(Conventions, description, "conventions", folder)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file."""
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise PackageError(f"{path} does not exist") from error
    except (OSError, SafetensorError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from error


def read_header(path: Path) -> dict[str, TensorKind]:
    """Return shape and type of every tensor of a safetensors file; no tensor is loaded."""
    try:
        with safe_open(path, framework="pt") as file:
            entries = {name: file.get_slice(name) for name in file.keys()}
            return {n: (tuple(e.get_shape()), _TYPES.get(e.get_dtype(), e.get_dtype())) for n, e in entries.items()}
    except FileNotFoundError as error:
        raise PackageError(f"{path} does not exist") from error
    except (OSError, SafetensorError) as error:
        raise PackageError(f"{path} cannot be read: {error}") from error


def tensor_kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorKind]:
    """Return shape and type of tensors in memory."""
    return {name: (tuple(t.shape), type_name(t.dtype)) for name, t in tensors.items()}


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type as files and messages say it."""
    return str(dtype).removeprefix("torch.")


def tensor_problems(expected: Mapping[str, TensorKind], found: Mapping[str, TensorKind]) -> list[str]:
    """List every tensor that is missing, unknown, of another shape or of another type."""
    problems = [f"tensor {name} is missing" for name in expected if name not in found]
    problems += [f"tensor {name} is unknown" for name in found if name not in expected]
    for name in (n for n in expected if n in found):
        (shape, dtype), (found_shape, found_dtype) = expected[name], found[name]
        if shape != found_shape:
            problems.append(f"tensor {name} has shape {list(found_shape)}, the config asks for {list(shape)}")
        if dtype != found_dtype:
            problems.append(f"tensor {name} has type {found_dtype}, the config asks for {dtype}")
    return problems


def check_inside(folder: Path, name: object, index: str) -> None:
    """Refuse a file name out of ``index`` that leads out of the folder both lie in."""
    if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\\" in name or "\0" in name:
        raise PackageError(f"{folder / index} names {name!r}, which is not a file beside it")
    if (folder / name).resolve().parent != folder.resolve():
        raise PackageError(f"{folder / name} leads out of its folder")


def _field(description: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    value = description.get(name)
    if not isinstance(value, dict):
        raise PackageError(f"{folder / DESCRIPTION} has no section {name!r}; it is needed and cannot be guessed")
    return value


def _dataclass(kind: type[T], description: Mapping[str, Any], name: str, folder: Path) -> T:
    section = _field(description, name, folder)
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(section) - set(known))
    missing = [
        n for n, f in known.items() if n not in section and f.default is MISSING and f.default_factory is MISSING
    ]
    if unknown or missing:
        raise PackageError(f"{folder / DESCRIPTION}: section {name} has unknown keys {unknown} and lacks {missing}")
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in section.items()}
    return kind(**values)
