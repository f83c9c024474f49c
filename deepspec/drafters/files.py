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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deepspec.contracts import Conventions, TargetInfo
from deepspec.drafters.registry import drafter_from_dict, drafter_to_dict
from deepspec.errors import PackageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deepspec.drafters.base import Drafter, DrafterConfig

FORMAT = "deepspec-drafter"
VERSION = 1
TENSORS = "drafter.safetensors"
DESCRIPTION = "drafter.json"

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
    """Build the drafter that ``folder`` describes and load its weights; it is not bound to a target yet."""
    description = read_description(folder)
    info = target_info(description, folder)
    conventions = read_conventions(description, folder)
    config: DrafterConfig = drafter_from_dict(_field(description, "drafter", folder))
    drafter = config.build(info, conventions.target_layer_ids, conventions.mask_token_id)
    if drafter.conventions != conventions:
        raise PackageError(
            f"{folder / DESCRIPTION}: conventions {asdict(conventions)} do not match what its drafter section builds, "
            f"{asdict(drafter.conventions)}; the file was changed by hand or written by another version"
        )
    load_tensors(drafter, read_tensors(folder / TENSORS), str(folder / TENSORS))
    return drafter


def read_description(folder: Path) -> dict[str, Any]:
    """Read and check ``drafter.json``."""
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PackageError(f"{path} does not exist; give a folder that training has written") from error
    except (OSError, ValueError) as error:
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


def load_tensors(drafter: Drafter, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    """Copy ``tensors`` into the drafter; every name and every shape has to match."""
    own = drafter.state_dict()
    problems = tensor_problems({name: tuple(value.shape) for name, value in own.items()}, tensors)
    if problems:
        raise PackageError(f"{origin} does not fit the drafter:\n" + "\n".join(problems))
    drafter.load_state_dict(dict(tensors))


def tensor_problems(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """List every tensor that is missing, unknown or of another shape."""
    problems = [f"missing tensor {name}" for name in expected if name not in tensors]
    problems += [f"unknown tensor {name}" for name in tensors if name not in expected]
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            problems.append(f"tensor {name} has shape {list(tensors[name].shape)}, the drafter needs {list(shape)}")
    return problems


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
