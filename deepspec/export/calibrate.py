"""Fit the temperatures of a drafter's confidence head on rounds that it really decodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deepspec.errors import ConfigError
from deepspec.evaluation.calibration import fit_temperatures, slot_scores
from deepspec.evaluation.confidence_rounds import decode_listening
from deepspec.inference.calibration import Calibration
from deepspec.inference.sampling import SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from deepspec.drafters.base import Drafter
    from deepspec.evaluation.acceptance import Decoded, Prompt
    from deepspec.evaluation.calibration import ConfidenceRounds, SlotScore
    from deepspec.inference.decoder import DecodingTarget


@dataclass(frozen=True)
class CalibrationMaterial:
    """What is decoded for it, and how."""

    prompts: Sequence[Prompt]
    split: str
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    settings: SamplerSettings = field(default_factory=SamplerSettings)
    """Of the first prompt; every further one has the next seed."""


@dataclass(frozen=True)
class Calibrated:
    """The temperatures, and the texts they were fitted on."""

    calibration: Calibration
    decoded: list[Decoded]


def calibrate(drafter: Drafter, target: DecodingTarget, material: CalibrationMaterial) -> Calibrated:
    """Decode the prompts with ``drafter``, bound to ``target``, and fit the temperatures of its confidence head.

    Raises:
        ConfigError: no round was decoded.
    """
    first = material.settings
    decoded, rounds = decode_listening(
        target,
        drafter,
        material.prompts,
        material.max_new_tokens,
        lambda index: replace(first, seed=first.seed + index),
        material.stop_ids,
    )
    if not len(rounds.logits):
        raise ConfigError(
            f"no round of the {len(material.prompts)} prompts of data.{material.split} says anything of the confidence "
            "head: give more prompts, or set export.calibration_prompts=0"
        )
    return Calibrated(_calibration(rounds, material), decoded)


def _calibration(rounds: ConfidenceRounds, material: CalibrationMaterial) -> Calibration:
    temperatures = fit_temperatures(rounds)
    before, after = slot_scores(rounds), slot_scores(rounds, temperatures)
    return Calibration(
        version=1,
        temperatures=temperatures,
        rounds=tuple(slot.rounds for slot in before),
        kept=tuple(slot.kept for slot in before),
        ece_before=_column(before, "ece"),
        ece_after=_column(after, "ece"),
        brier_before=_column(before, "brier"),
        brier_after=_column(after, "brier"),
        auc_before=_column(before, "auc"),
        auc_after=_column(after, "auc"),
        split=material.split,
        prompts=len(material.prompts),
        decoding_temperature=material.settings.temperature,
        max_new_tokens=material.max_new_tokens,
    )


def _column(scores: Sequence[SlotScore], name: str) -> tuple[float | None, ...]:
    values = [float(getattr(score, name)) for score in scores]
    return tuple(None if math.isnan(value) else value for value in values)
