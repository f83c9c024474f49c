"""``calibration.json``: temperatures that make a drafter's confidence mean what it says, and what was measured.

Slot j's log-odds are divided by temperature j; the chance that a block is kept up to slot j is the product of the
chances up to it (DSpark, section 3.2.1). All lists have one entry a drafted slot, gamma of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepspec.errors import PackageError
from deepspec.inference.package_config import CALIBRATION
from deepspec.inference.strict_json import build, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deepspec.inference.package_config import PackageConfig

SCORES = ("ece_before", "ece_after", "brier_before", "brier_after", "auc_before", "auc_after")
PER_SLOT = ("temperatures", "rounds", "kept", *SCORES)


@dataclass(frozen=True)
class Calibration:
    """The contents of ``calibration.json``. Scores are of the product of chances against what was kept."""

    version: Literal[1]
    temperatures: tuple[float, ...]
    rounds: tuple[int, ...]  # that show whether everything up to the slot was kept
    kept: tuple[int, ...]  # of them: those that kept it
    ece_before: tuple[float | None, ...]  # expected calibration error; None without a round
    ece_after: tuple[float | None, ...]
    brier_before: tuple[float | None, ...]
    brier_after: tuple[float | None, ...]
    auc_before: tuple[float | None, ...]  # None too where all rounds ended alike
    auc_after: tuple[float | None, ...]
    split: str
    prompts: int
    decoding_temperature: float  # of the target's and the drafter's sampling; 0 is greedy
    max_new_tokens: int  # of each decoded text


def read_calibration(folder: Path, config: PackageConfig) -> Calibration | None:
    """Read and check the file that ``config`` names; None where it names none.

    Raises:
        PackageError: naming the key.
    """
    if config.calibration is None:
        return None
    calibration = build(Calibration, read_json(folder, CALIBRATION), CALIBRATION)
    problems = list(calibration_problems(calibration, config.gamma))
    if problems:
        raise PackageError("\n".join(f"{CALIBRATION}: {problem}" for problem in problems))
    return calibration


def calibration_problems(calibration: Calibration, gamma: int) -> Iterator[str]:
    """List what cannot be in a calibration of a drafter with ``gamma`` slots."""
    wrong = [name for name in PER_SLOT if len(getattr(calibration, name)) != gamma]
    if wrong:
        yield from (f"{n} has {len(getattr(calibration, n))} entries, config.json says gamma={gamma}" for n in wrong)
        return
    yield from (f"temperatures[{j}]={t} must be above 0" for j, t in enumerate(calibration.temperatures) if not t > 0)
    yield from _count_problems(calibration)
    for name in SCORES:
        for j, value in enumerate(getattr(calibration, name)):
            if value is not None and not 0 <= value <= 1:
                yield f"{name}[{j}]={value} must lie between 0 and 1"
            if value is None and calibration.rounds[j] and not name.startswith("auc"):
                yield f"{name}[{j}] is null, but rounds[{j}]={calibration.rounds[j]}"
    for name in ("prompts", "max_new_tokens"):
        if getattr(calibration, name) < 1:
            yield f"{name}={getattr(calibration, name)} must be at least 1"
    if calibration.decoding_temperature < 0:
        yield f"decoding_temperature={calibration.decoding_temperature} must not be negative"


def _count_problems(calibration: Calibration) -> Iterator[str]:
    before = calibration.rounds[0]
    for j, (rounds, kept) in enumerate(zip(calibration.rounds, calibration.kept, strict=True)):
        if not 0 <= kept <= rounds:
            yield f"kept[{j}]={kept} must be in 0 .. {rounds}, the rounds of that slot"
        if rounds > before:
            yield f"rounds[{j}]={rounds} is more than the {before} of the slot before"
        before = rounds
