"""Write an inference package.

``config.json``, ``model.safetensors``, ``calibration.json`` of a drafter with a confidence head, ``selfcheck.json``,
``card.md`` and ``checksums.json``; weights above 5 GB are spread over several files with an index.

A package grows under a temporary name beside its place and is renamed when everything about it has been checked. Under
its own name there is a whole package, the one that was there before, or nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepspec.drafters.files import tensor_kinds, tensor_problems
from deepspec.drafters.registry import drafter_to_dict
from deepspec.errors import ConfigError, PackageError
from deepspec.export.gptq import rounded_beforehand
from deepspec.export.quantise import Formats, cast, pack, wide_tensors
from deepspec.export.shards import SHARD_BYTES, save_weights, split
from deepspec.inference.package_checks import expected_tensors, file_digest
from deepspec.inference.package_config import (
    CALIBRATION,
    CHECKSUMS,
    CONFIG,
    FORMAT,
    HEADER_KEYS,
    SELFCHECK,
    PackageConfig,
    StoredEmbeddings,
    make_config,
)
from deepspec.inference.package_embeddings import EMBEDDING, HEAD, HEAD_BIAS, embedding_tensors
from deepspec.inference.profiles import PROFILES, Bfloat16, matrices, plan, width_problems
from deepspec.inference.strict_json import to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.calibration import Calibration
    from deepspec.inference.profiles import Profile, Quantisation
    from deepspec.inference.selfcheck import SelfCheck
    from deepspec.nn.head import FrozenHead

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
    include_embeddings: bool = False,
    products: Mapping[str, Tensor] | None = None,
) -> tuple[PackageConfig, dict[str, Tensor]]:
    """Return config and tensors of the native layout for a trained fp32 drafter.

    Args:
        drafter: The trained drafter; bound to its target where ``include_embeddings`` is asked for.
        drafter_config: Its configuration.
        target: The target that it was trained with.
        profile: Number formats.
        template_options: Variables of the chat template that the drafter was trained with.
        formats: What bends the profile.
        wide_states: Modules whose states fp16 cannot hold, which the package then says.
        include_embeddings: Put copies of the target's embedding and head into the package.
        products: Of the inputs of 4-bit matrices, by name (``gptq.input_products``): these are rounded with
            compensation, the others one value at a time.

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
        stored_embeddings=_stored(drafter.head) if include_embeddings else None,
    )
    tensors = pack(weights, config, rounded_beforehand(weights, products or {}, formats.int4_group))
    if include_embeddings:
        tensors |= _copies(drafter.head, config)
    expected = expected_tensors(config, drafter_config) | embedding_tensors(config)
    problems = tensor_problems(expected, tensor_kinds(tensors))
    if problems:
        raise PackageError("the drafter does not fit its own configuration:\n" + "\n".join(problems))
    return config, tensors


def _stored(head: FrozenHead) -> StoredEmbeddings:
    return StoredEmbeddings(tied=head.tied, head_bias=head.bias is not None)


def _copies(head: FrozenHead, config: PackageConfig) -> dict[str, Tensor]:
    """Return the copies of embedding and head that the package holds, in its 16-bit type; tied ones are one."""
    own = {EMBEDDING: head.embedding, HEAD: head.weight, HEAD_BIAS: head.bias}
    chosen = {name: own[name] for name in embedding_tensors(config)}
    dtype = getattr(torch, config.dtype)
    return {name: cast(name, t.detach().cpu(), dtype).clone() for name, t in chosen.items() if t is not None}


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


def write_package(
    folder: Path,
    config: PackageConfig,
    tensors: Mapping[str, Tensor],
    calibration: Calibration | None = None,
    selfcheck: SelfCheck | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> PackageConfig:
    """Write config, weights, what is given of the other files, and checksums into ``folder``.

    The weights' headers carry copies of the JSON files. Returns the config that was written, which names the files.
    """
    config = replace(
        config,
        weights="model.safetensors.index.json" if len(split(tensors, shard_bytes)) > 1 else "model.safetensors",
        calibration=None if calibration is None else "calibration.json",
        selfcheck=None if selfcheck is None else "selfcheck.json",
    )
    files = {CONFIG: config, CALIBRATION: calibration, SELFCHECK: selfcheck}
    plain = {name: to_json(value) for name, value in files.items() if value is not None}
    for name, value in plain.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    save_weights(folder, tensors, {HEADER_KEYS[name]: json.dumps(value) for name, value in plain.items()}, shard_bytes)
    write_checksums(folder)
    return config


def write_checksums(folder: Path) -> None:
    """Write the sha256 of every file of the package."""
    digests = {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.name != CHECKSUMS}
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
    """Refuse to overwrite anything that is not a package, or holds files that no export has written.

    Raises:
        ConfigError: with what is in the way.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        found = json.loads((out / CONFIG).read_text(encoding="utf-8"))
        ours = found.get("format") == FORMAT or SERVER_KEY in found
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ConfigError(f"export.out={out} exists and is not a package: give another folder, or remove it")
    try:
        listed = json.loads((out / CHECKSUMS).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{out / CHECKSUMS} cannot be read: give another export.out, or remove {out}") from error
    if strange := sorted(path.name for path in out.iterdir() if path.name not in {*listed, CHECKSUMS}):
        raise ConfigError(
            f"export.out={out} holds {', '.join(strange)}, which no export has written and which would be lost: "
            "move that away, or give another folder"
        )


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
