"""From a trained drafter to a verified package under its final name, or to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from deepspec.export.card import Origin, card_text, report_text
from deepspec.export.compare import wide_states
from deepspec.export.package import native_package, staged, write_checksums, write_package
from deepspec.export.quantise import Formats, balance
from deepspec.export.sizes import part_sizes
from deepspec.export.verify import Material, Verification, refuse, verify
from deepspec.inference.decoder import DecodingTarget
from deepspec.inference.package import load_package
from deepspec.inference.package_checks import BindableTarget
from deepspec.inference.package_config import CARD
from deepspec.inference.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.inference.profiles import Profile


class ExportTarget(BindableTarget, DecodingTarget, Protocol):
    """A target that can be bound to a drafter and decode: ``targets.Target`` fits."""


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
        max_length_change: Largest relative loss of accepted length.
        force: Write the package although its verification failed.
        origin: For the card.

    Raises:
        VerificationError: The package strays from the drafter; nothing is left under ``out``.
        PackageError: The target is not the one trained with.
    """
    spec, formats = PROFILES[profile], formats or Formats()
    if spec.parts:
        balance(drafter)
    measured = formats.overflow == "bf16" and spec.dtype == "float16"
    wide = wide_states(drafter.eval(), target, material, torch.float16) if measured else ()
    config, tensors = native_package(
        drafter, drafter_config, trained_with, profile, template_options, formats=formats, wide_states=wide
    )
    sizes = part_sizes(drafter.state_dict(), tensors)
    with staged(out) as folder:
        write_package(folder, config, tensors)
        packaged = load_package(folder, target, dtype=torch.float32)
        verification = verify(
            drafter.eval(), packaged, target, material, config=config, max_length_change=max_length_change
        )
        refuse(verification, force=force)
        forced = bool(verification.problems)
        card = card_text(config, verification, sizes, origin or Origin(), forced=forced)
        (folder / CARD).write_text(card, encoding="utf-8")
        write_checksums(folder)
    return Exported(out, verification, report_text(config, verification, sizes))
