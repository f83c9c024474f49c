"""From the keys of a run to what ``deepspec.export`` writes: a package, or a folder for servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.contracts import Sample
from deepspec.data.conversations import read_conversations
from deepspec.data.prompts import read_prompts
from deepspec.errors import ConfigError
from deepspec.export.calibrate import CalibrationMaterial, calibrate
from deepspec.export.layouts.command import export_for_servers
from deepspec.export.material import read_material, spread
from deepspec.export.quantise import Formats
from deepspec.export.run import export_package, four_bit
from deepspec.inference.sampling import SamplerSettings
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.config.schema import RunConfig
    from deepspec.contracts import TargetInfo
    from deepspec.data.chat import ChatRenderer
    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.export.card import Origin
    from deepspec.export.run import Exported, ExportTarget
    from deepspec.export.verify import Material

log = get_logger(__name__)

SPLIT = "validation"
ROUNDING_SAMPLES = 128
"""Conversations of the validation split that 4-bit matrices are rounded on: about 20,000 slots."""
NO_VALIDATION = (
    "data.validation is not set: the confidence head is calibrated on its prompts; "
    "export.calibration_prompts=0 leaves that out"
)


@dataclass(frozen=True)
class Trained:
    """A drafter out of a checkpoint, bound to its target."""

    drafter: Drafter
    config: DrafterConfig
    trained_with: TargetInfo


def check_splits(run: RunConfig) -> None:
    """Refuse a run without the data that export decodes, before a weight is loaded.

    Raises:
        ConfigError: naming the key.
    """
    if run.data.test is None:
        raise ConfigError("data.test is not set: export compares the package with the drafter on test conversations")
    wanted = run.export.calibration_prompts > 0 and getattr(run.drafter, "confidence_head", False)
    if wanted and run.data.validation is None:
        raise ConfigError(NO_VALIDATION)


def export_as_asked(
    run: RunConfig, trained: Trained, target: ExportTarget, renderer: ChatRenderer, folder: Path, origin: Origin
) -> Exported:
    """Write what the keys of ``run.export`` ask for; ``folder`` is the run's, ``renderer`` that of the target's chat.

    Raises:
        ConfigError: a split that is needed is not set.
        DeepSpecError: as ``export_package`` and ``export_for_servers`` do.
    """
    material = _material(run, renderer)
    rounds = calibration_material(run, trained.drafter, renderer)
    if run.export.layout == "native":
        rounding = rounding_samples(run, trained.drafter, renderer)
        return _native(run, trained, target, folder, material, rounds, rounding, origin)
    out = Path(run.export.out or folder / f"package-{run.export.layout}")
    fit = None if rounds is None else partial(_temperatures, trained.drafter, target, rounds)
    return export_for_servers(
        run.export, trained.drafter, trained.config, trained.trained_with, target, out, material, origin, fit
    )


def _temperatures(drafter: Drafter, target: ExportTarget, rounds: CalibrationMaterial) -> tuple[float, ...]:
    return calibrate(drafter, target, rounds).calibration.temperatures


def _native(
    run: RunConfig,
    trained: Trained,
    target: ExportTarget,
    folder: Path,
    material: Material,
    rounds: CalibrationMaterial | None,
    rounding: Sequence[Sample],
    origin: Origin,
) -> Exported:
    settings = run.export
    return export_package(
        trained.drafter,
        trained.config,
        trained.trained_with,
        target,
        Path(settings.out or folder / f"package-{settings.profile}"),
        material,
        profile=settings.profile,
        formats=Formats(settings.qkv, settings.int4_group, settings.overflow),
        template_options=run.target.template_options,
        calibration=rounds,
        rounding=rounding,
        include_embeddings=settings.include_embeddings,
        max_length_change=settings.max_length_change,
        force=settings.force,
        origin=origin,
    )


def _material(run: RunConfig, renderer: ChatRenderer) -> Material:
    return read_material(
        str(run.data.test),
        renderer,
        prompts=run.export.verify_prompts,
        samples=run.export.verify_samples,
        max_new_tokens=run.evaluate.max_new_tokens,
        stop_ids=renderer.eos_token_ids,
    )


def calibration_material(run: RunConfig, drafter: Drafter, renderer: ChatRenderer) -> CalibrationMaterial | None:
    """Return what the confidence head is calibrated on; None without such a head, or where it is not asked for.

    Texts are decoded as ``evaluate`` decodes them.

    Raises:
        ConfigError: there is no validation split.
    """
    count = run.export.calibration_prompts
    if count == 0 or not drafter.predicts_acceptance:
        return None
    if run.data.validation is None:
        raise ConfigError(NO_VALIDATION)  # a drafter from outside, which ``check_splits`` does not know
    return CalibrationMaterial(
        prompts=spread(read_prompts(run.data.validation, renderer), count),
        split=SPLIT,
        max_new_tokens=run.evaluate.max_new_tokens,
        stop_ids=renderer.eos_token_ids,
        settings=SamplerSettings(run.evaluate.temperature, run.evaluate.seed),
    )


def rounding_samples(run: RunConfig, drafter: Drafter, renderer: ChatRenderer) -> list[Sample]:
    """Return the conversations on which 4-bit matrices are rounded with compensation; none for other profiles."""
    if not four_bit(drafter, run.export.profile):
        return []
    path = run.data.validation
    conversations = [] if path is None else spread(list(read_conversations(path)), ROUNDING_SAMPLES)
    rendered = [renderer.render(conversation) for conversation in conversations]
    samples = [sample for sample in rendered if isinstance(sample, Sample)]
    if not samples:
        why = " is not set" if path is None else f"={path} has no answered conversation"
        log.warning("data.validation%s: 4-bit values are rounded one by one, which loses more", why)
    return samples
