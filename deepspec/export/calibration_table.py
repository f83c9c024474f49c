"""What a card says of the confidence head's calibration, and of the texts it was fitted on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.evaluation.acceptance import by_domain
from deepspec.evaluation.markup import markdown_text
from deepspec.export.compare import RESAMPLES
from deepspec.export.table import table

if TYPE_CHECKING:
    from deepspec.export.calibrate import Calibrated
    from deepspec.inference.calibration import Calibration

CALIBRATION_HEAD = ("slot", "rounds", "kept", "temperature", "ECE", "Brier score", "AUC")
LENGTH_HEAD = ("domain", "prompts", "rounds", "accepted length [95 %]", "per prompt [95 %]")
NOTE = """The chance that a block is kept up to a slot is the product of sigmoid(logit / temperature) over the slots up
to it. Scores are of this product against what the target kept, before and after, on the rounds that the temperatures
were fitted on; ECE is the expected calibration error in 15 bins. Slots that few rounds judged keep a temperature of 1.
"""


def calibration_parts(calibrated: Calibrated) -> list[str]:
    """Return the parts of the card."""
    found = calibrated.calibration
    return [
        f"## Confidence, calibrated on {found.prompts} prompts of the {markdown_text(found.split)} split\n",
        f"Decoded at temperature {found.decoding_temperature:g}, {found.max_new_tokens} new tokens at most.\n",
        table(CALIBRATION_HEAD, calibration_rows(found)),
        NOTE,
        "Accepted length of this package on these texts (tokens committed per forward pass of the target):\n",
        table(LENGTH_HEAD, length_rows(calibrated)),
    ]


def calibration_rows(found: Calibration) -> list[tuple[str, ...]]:
    """Return a row for each slot, under ``CALIBRATION_HEAD``."""
    scores = (
        (found.ece_before, found.ece_after),
        (found.brier_before, found.brier_after),
        (found.auc_before, found.auc_after),
    )
    return [
        (
            str(j + 1),
            str(found.rounds[j]),
            f"{found.kept[j] / found.rounds[j]:.1%}" if found.rounds[j] else "",
            f"{temperature:.3g}",
            *(_change(before[j], after[j]) for before, after in scores),
        )
        for j, temperature in enumerate(found.temperatures)
    ]


def length_rows(calibrated: Calibrated) -> list[tuple[str, ...]]:
    """Return a row for each domain, under ``LENGTH_HEAD``."""
    return [
        (markdown_text(domain), str(found.prompts), str(found.rounds), str(found.per_round), str(found.per_request))
        for domain, found in by_domain(calibrated.decoded, RESAMPLES, seed=0).items()
    ]


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    return f"{before:.3f} -> {after:.3f}"
