"""From a trained drafter to a verified package under its final name, or to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from deepspec.export.calibrate import Calibrated, CalibrationMaterial, calibrate
from deepspec.export.card import Origin, card_text, report_text
from deepspec.export.compare import wide_states
from deepspec.export.gptq import FeatureTarget, input_products
from deepspec.export.material import spread
from deepspec.export.package import native_package, staged, write_checksums, write_package
from deepspec.export.quantise import Formats, balance
from deepspec.export.shards import SHARD_BYTES
from deepspec.export.sizes import part_sizes
from deepspec.export.verify import Material, Verification, refuse, verify
from deepspec.inference.assemble import assemble
from deepspec.inference.decoder import DecodingTarget
from deepspec.inference.package import load_package
from deepspec.inference.package_checks import BindableTarget, check_target
from deepspec.inference.package_config import CARD
from deepspec.inference.package_embeddings import embedding_tensors
from deepspec.inference.profiles import INT4, PROFILES, matrices
from deepspec.inference.selfcheck import SelfCheck, make_selfcheck

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from deepspec.contracts import Sample, TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.calibration import Calibration
    from deepspec.inference.package_config import PackageConfig
    from deepspec.inference.profiles import Profile

CHECKED_PROMPTS = 4
"""Prompts stored for the self-check at load, each of which costs a forward pass there."""


class ExportTarget(BindableTarget, DecodingTarget, FeatureTarget, Protocol):
    """A target that can be bound to a drafter, decode, and give features: ``targets.Target`` fits."""


@dataclass(frozen=True)
class Exported:
    """What was written, and what was measured."""

    folder: Path
    verification: Verification
    report: str


def export_package(
    drafter: Drafter,
    drafter_config: DrafterConfig,
    trained_with: TargetInfo,
    target: ExportTarget,
    out: Path,
    material: Material,
    *,
    profile: Profile,
    formats: Formats | None = None,
    template_options: Mapping[str, object] | None = None,
    calibration: CalibrationMaterial | None = None,
    rounding: Sequence[Sample] = (),
    include_embeddings: bool = False,
    shard_bytes: int = SHARD_BYTES,
    max_length_change: float = 0.01,
    force: bool = False,
    origin: Origin | None = None,
) -> Exported:
    """Write the package of a trained fp32 drafter, reload it from disk, verify it, and give it its name.

    Args:
        drafter: The trained drafter, bound to ``target``; where matrices are quantised its MLPs are balanced in place.
        drafter_config: Its configuration.
        trained_with: The target that it was trained with, as its checkpoint says.
        target: The target at hand; it has to be the same one.
        out: The package's folder; an older package there is replaced.
        material: Samples and prompts of the comparison.
        profile: Number formats.
        formats: What bends the profile.
        template_options: Variables of the chat template that the drafter was trained with.
        calibration: What the confidence head is calibrated on; None leaves it as trained.
        rounding: Samples, not those of ``material``, on whose blocks 4-bit matrices are rounded with compensation.
        include_embeddings: Put copies of the target's embedding and head into the package.
        shard_bytes: Largest file of weights.
        max_length_change: Largest relative loss of accepted length.
        force: Write the package although its verification failed.
        origin: For the card.

    Raises:
        VerificationError: The package strays from the drafter; nothing is left under ``out``.
        PackageError: The target is not the one trained with.
    """
    formats = formats or Formats()
    if PROFILES[profile].parts:
        balance(drafter)
    config, tensors = native_package(
        drafter,
        drafter_config,
        trained_with,
        profile,
        template_options,
        formats=formats,
        wide_states=_wide(drafter, target, material, profile, formats),
        include_embeddings=include_embeddings,
        products=input_products(drafter, target, rounding, four_bit(drafter, profile)) if rounding else None,
    )
    sizes = part_sizes(drafter.state_dict(), tensors)
    with staged(out) as folder:
        said = _beside(config, drafter_config, tensors, target, material, calibration)
        config = write_package(folder, config, tensors, said.calibration, said.selfcheck, shard_bytes=shard_bytes)
        packaged = load_package(folder, target, dtype=torch.float32, self_check=True)
        verification = verify(
            drafter.eval(), packaged, target, material, config=config, max_length_change=max_length_change
        )
        refuse(verification, force=force)
        card = card_text(
            config,
            verification,
            sizes,
            origin or Origin(),
            forced=bool(verification.problems),
            calibrated=said.calibrated,
        )
        (folder / CARD).write_text(card, encoding="utf-8")
        write_checksums(folder)
    return Exported(out, verification, report_text(config, verification, sizes, said.calibration))


def four_bit(drafter: Drafter, profile: Profile) -> tuple[str, ...]:
    """Return the names of the matrices that ``profile`` stores in 4 bits."""
    parts = [part for part, scheme in PROFILES[profile].parts.items() if scheme == INT4]
    found = matrices(drafter)
    return tuple(name for part in parts for name in found.get(part, ()))


def _wide(
    drafter: Drafter, target: ExportTarget, material: Material, profile: Profile, formats: Formats
) -> tuple[str, ...]:
    """Return the modules whose states are beyond fp16, where the package is to say so."""
    measured = formats.overflow == "bf16" and PROFILES[profile].dtype == "float16"
    return wide_states(drafter.eval(), target, material, torch.float16) if measured else ()


@dataclass(frozen=True)
class _Beside:
    """What goes into a package beside its weights, measured with the drafter that those make."""

    calibrated: Calibrated | None
    selfcheck: SelfCheck | None

    @property
    def calibration(self) -> Calibration | None:
        return None if self.calibrated is None else self.calibrated.calibration


def _beside(
    config: PackageConfig,
    drafter_config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    target: ExportTarget,
    material: Material,
    calibration: CalibrationMaterial | None,
) -> _Beside:
    check_target(config.target, target)
    own = {name: tensor for name, tensor in tensors.items() if name not in embedding_tensors(config)}
    packaged = assemble(config, drafter_config, own, target.head, dtype=torch.float32)
    calibrated = None if calibration is None else calibrate(packaged, target, calibration)
    prompts = material.prompts or [sample.input_ids for sample in material.samples if len(sample.input_ids)]
    chosen = spread(prompts, CHECKED_PROMPTS)
    return _Beside(calibrated, make_selfcheck(packaged, target, chosen) if chosen else None)
