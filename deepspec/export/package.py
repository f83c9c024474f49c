"""Write an inference package: ``config.json``, ``model.safetensors``, ``card.md`` and ``checksums.json``.

A package grows under a temporary name beside its place and is renamed when everything about it has been checked. Under
its own name there is a whole package, the one that was there before, or nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from deepspec.drafters.files import tensor_kinds, tensor_problems
from deepspec.drafters.registry import drafter_to_dict
from deepspec.errors import ConfigError, PackageError
from deepspec.export.quantise import Formats, pack, wide_tensors
from deepspec.inference.package_checks import expected_tensors, file_digest
from deepspec.inference.package_config import (
    CARD,
    CHECKSUMS,
    CONFIG,
    FORMAT,
    HEADER_KEY,
    WEIGHTS,
    PackageConfig,
    make_config,
    to_json,
)
from deepspec.inference.profiles import PROFILES, Bfloat16, matrices, plan, width_problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.profiles import Profile, Quantisation

SERVER_KEY = "deepspec"
"""Key of the block in the config of a layout for servers that says who wrote it."""


def native_package(
    drafter: Drafter,
    drafter_config: DrafterConfig,
    target: TargetInfo,
    profile: Profile,
    template_options: Mapping[str, object] | None = None,
    *,
    formats: Formats | None = None,
    wide_states: tuple[str, ...] = (),
) -> tuple[PackageConfig, dict[str, Tensor]]:
    """Return config and tensors of the native layout for a trained fp32 drafter.

    Args:
        drafter: The trained drafter.
        drafter_config: Its configuration.
        target: The target that it was trained with.
        profile: Number formats.
        template_options: Variables of the chat template that the drafter was trained with.
        formats: What bends the profile.
        wide_states: Modules whose states fp16 cannot hold, which the package then says.

    Raises:
        ConfigError: The groups of 4-bit weights do not divide a width.
        DeepSpecError: A weight is not finite or overflows the 16-bit type.
        PackageError: The drafter's tensors do not fit its own configuration.
    """
    formats = formats or Formats()
    weights = {name: value.detach().cpu() for name, value in drafter.state_dict().items()}
    quantisation = plan(matrices(drafter), profile, qkv=formats.qkv, int4_group=formats.int4_group)
    _check_groups(quantisation, weights)
    config = make_config(
        profile=profile,
        conventions=drafter.conventions,
        target=target,
        drafter=drafter_to_dict(drafter_config),
        template_options=template_options,
        quantisation=quantisation,
        bfloat16=_bfloat16(weights, quantisation, profile, formats, wide_states),
    )
    tensors = pack(weights, config)
    problems = tensor_problems(expected_tensors(config, drafter_config), tensor_kinds(tensors))
    if problems:
        raise PackageError("the drafter does not fit its own configuration:\n" + "\n".join(problems))
    return config, tensors


def _check_groups(quantisation: Quantisation, weights: Mapping[str, Tensor]) -> None:
    problems = width_problems(quantisation, {name: tuple(t.shape) for name, t in weights.items()})
    if problems:
        raise ConfigError("; ".join(problems) + ": set export.int4_group=32, or another export.profile")


def _bfloat16(
    weights: Mapping[str, Tensor],
    quantisation: Quantisation,
    profile: Profile,
    formats: Formats,
    wide_states: tuple[str, ...],
) -> Bfloat16:
    """Return what is kept in bf16; nothing unless ``export.overflow`` allows it, or where all is bf16 already."""
    if formats.overflow == "refuse" or PROFILES[profile].dtype == "bfloat16":
        return Bfloat16()
    quantised = tuple(name for group in quantisation.values() for name in group.tensors)
    return Bfloat16(wide_tensors(weights, quantised), wide_states)


def write_package(folder: Path, config: PackageConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config, weights and checksums into ``folder``. The weights' header carries a copy of the config."""
    plain = to_json(config)
    (folder / CONFIG).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt", HEADER_KEY: json.dumps(plain)})
    write_checksums(folder)


def write_checksums(folder: Path) -> None:
    """Write the sha256 of every file of the package."""
    digests = {name: file_digest(folder / name) for name in (CONFIG, WEIGHTS, CARD) if (folder / name).exists()}
    (folder / CHECKSUMS).write_text(json.dumps({"sha256": digests}, indent=2) + "\n", encoding="utf-8")


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Give a temporary folder beside ``out`` that takes its place when the block ends well, and vanishes otherwise."""
    check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_out(out: Path) -> None:
    """Refuse to overwrite anything that is not a package."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        found = json.loads((out / CONFIG).read_text(encoding="utf-8"))
        ours = found.get("format") == FORMAT or SERVER_KEY in found
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ConfigError(f"export.out={out} exists and is not a package: give another folder, or remove it")


def _publish(temporary: Path, out: Path) -> None:
    """Rename the finished folder to its name; an older package there gives way at the last moment."""
    older = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(older)
    try:
        temporary.rename(out)
    except OSError:
        if older.exists():
            older.rename(out)
        raise
    shutil.rmtree(older, ignore_errors=True)
