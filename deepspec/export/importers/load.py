"""Bring in a drafter that another project has trained, so that it can be evaluated, trained further and exported.

The drafter is built from what its folder says and from the target, and every tensor has to find its place. Embedding
and head stay the target's own: a folder that brings others is refused, because they would be lost without a word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepspec.drafters.files import save_drafter, tensor_kinds, tensor_problems
from deepspec.drafters.registry import drafter_from_dict
from deepspec.errors import ConfigError, PackageError
from deepspec.export.importers.foreign import Foreign, read_foreign
from deepspec.export.importers.structure import check_against, drafter_config
from deepspec.export.package import staged
from deepspec.inference.package import load_package
from deepspec.inference.package_checks import BindableTarget
from deepspec.inference.package_config import CONFIG, FORMAT, read_config
from deepspec.inference.strict_json import read_json
from deepspec.nn.vocabulary import target_ids
from deepspec.targets.layers import validate_layer_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from deepspec.config.schema import RunConfig
    from deepspec.drafters.base import Drafter, DrafterConfig

COPY_TOLERANCE = 3e-3
"""Relative L2 distance of a 16-bit copy from the target's own matrix; rounding to bf16 gives about 1.7e-3."""


@dataclass(frozen=True)
class Imported:
    """A drafter out of another project's folder, in fp32 and bound to the target."""

    drafter: Drafter
    config: DrafterConfig
    project: str


def import_drafter(folder: Path, target: BindableTarget) -> Imported:
    """Read the folder of another project, a layout for servers, or a native package.

    Args:
        folder: Published DSpark, DFlash or Eagle3, z-lab, speculators, SpecForge, or what ``deepspec.export`` wrote.
        target: The target that the drafter was trained with.

    Raises:
        PackageError: with the file, key or tensor that is wrong, or why the drafter cannot be held here.
    """
    if read_json(folder, CONFIG).get("format") == FORMAT:
        packaged = load_package(folder, target, dtype=torch.float32)
        return Imported(packaged, drafter_from_dict(read_config(folder).drafter), "native")
    foreign = read_foreign(folder)
    check_against(foreign, target.info)
    config, foreign = drafter_config(foreign, target.info)
    drafter = _build(foreign, config, target)
    _check_copies(foreign, target, drafter.d2t)
    drafter.bind(target.head)
    return Imported(drafter.eval().requires_grad_(False), config, foreign.project)


def import_run(
    source: Path, target: BindableTarget, run: RunConfig, out: Path, save_config: Callable[[RunConfig, Path], None]
) -> Path:
    """Bring a drafter in as a run folder, which evaluate and export read, and ``train.warm_start`` too.

    Args:
        source: The folder that is brought in.
        target: The target that the drafter was trained with.
        run: A run with that target; its data and settings go into the new folder.
        out: The new folder.
        save_config: Writes a run's config to a file.

    Raises:
        ConfigError: ``out`` is ``source``.
        PackageError: as ``import_drafter`` does.
    """
    if out.resolve() == source.resolve():
        raise ConfigError(
            f"export.out={out} is source={source} itself, which would be replaced: choose another export.out"
        )
    imported = import_drafter(source, target)
    conventions = imported.drafter.conventions
    config = replace(
        run,
        drafter=imported.config,
        target=replace(
            run.target, target_layer_ids=conventions.target_layer_ids, mask_token_id=conventions.mask_token_id
        ),
        paths=replace(run.paths, run=str(out)),
    )
    with staged(out) as folder:
        save_drafter(folder, imported.drafter, imported.config, target.info)
        save_config(config, folder / "config.yaml")
    return out


def _build(foreign: Foreign, config: DrafterConfig, target: BindableTarget) -> Drafter:
    """Build the drafter and give every tensor its place."""
    if problems := config.problems():
        raise PackageError("\n".join(f"{CONFIG}: {problem}" for problem in problems))
    try:
        taps = validate_layer_ids(foreign.taps, target.info.num_layers)
        drafter = config.build(target.info, taps, _mask_token(foreign, target))
    except (ConfigError, RuntimeError, ValueError) as error:
        raise PackageError(f"{CONFIG}: {error}") from error
    problems = tensor_problems(tensor_kinds(drafter.state_dict()), tensor_kinds(foreign.tensors))
    if problems:
        hint = f" ({len(taps)} layers are tapped)" if any("fc.weight" in problem for problem in problems) else ""
        raise PackageError(f"the tensors do not fit the drafter{hint}:\n" + "\n".join(problems))
    _check_finite(foreign.tensors)
    drafter.load_state_dict(foreign.tensors)
    return drafter.to(target.head.weight.device)


def _mask_token(foreign: Foreign, target: BindableTarget) -> int:
    """Return the mask token's id; an autoregressive drafter never says it, and has none to use."""
    if foreign.project in ("eagle3", "published_eagle3") and foreign.settings.get("mask_token_id") is None:
        return 0
    mask = foreign.number("mask_token_id")
    if not 0 <= mask < target.info.vocab_size:
        raise PackageError(f"{CONFIG}: mask_token_id={mask} must be in 0 .. {target.info.vocab_size - 1}")
    return mask


def _check_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise PackageError(f"tensor {name} holds values that are not finite")


def _check_copies(foreign: Foreign, target: BindableTarget, d2t: Tensor | None) -> None:
    """Compare embedding and head of the folder with the target's own."""
    head = target.head.weight if d2t is None else target.head.weight[target_ids(d2t)]
    for what, found, own in (
        ("embed_tokens.weight", foreign.embedding, target.head.embedding),
        ("lm_head.weight", foreign.head, head),
    ):
        if found is not None and not _is_copy(found, own):
            raise PackageError(
                f"tensor {what} is not the target's: it was trained, or belongs to another target. Drafters here use "
                "the target's own, so it would be lost"
            )


def _is_copy(found: Tensor, own: Tensor) -> bool:
    reference = own.detach().to("cpu", torch.float32)
    if found.shape != reference.shape:
        return False
    return float((found - reference).norm()) <= COPY_TOLERANCE * float(reference.norm())
