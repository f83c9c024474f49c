"""The certificate: how much of the accepted length a package may have lost, domain by domain.

A domain is what evaluation calls one. Its samples are drawn with replacement (they are the unit, for blocks of one text
depend on each other), the same ones for both drafters, so that the interval is one of the *change*. What is held
against the limit is the upper end of the 95 % interval of the relative loss: a bound, not an estimate. Too few samples
bound nothing but that a round always commits its one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.evaluation.acceptance import ALL
from deepspec.evaluation.confidence import expected_auc, expected_brier
from deepspec.evaluation.statistics import Interval, bootstrap_ratio, resample
from deepspec.export.compare import RESAMPLES, mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.export.compare import SampleRows

MIN_SAMPLES = 2
CERTIFICATE_HEAD = (
    "domain", "samples", "whole blocks", "trained drafter", "package", "loss", "95 % interval", "mean TV",
    "confidence AUC", "confidence Brier",
)  # fmt: skip


@dataclass(frozen=True)
class ConfidenceDrift:
    """Scores of the confidence heads, each against the acceptance of its own drafter."""

    auc_before: float
    auc_after: float
    brier_before: float
    brier_after: float


@dataclass(frozen=True)
class DomainResult:
    """One domain's comparison."""

    domain: str
    samples: int  # that hold a whole block
    blocks: int
    before: float  # mean expected accepted length of whole blocks at temperature 1; nan without one
    after: float
    loss: Interval
    """Share of the accepted length that was lost, paired by sample; negative is a gain."""
    mean_tv: float
    confidence: ConfidenceDrift | None

    @property
    def bound(self) -> float:
        """Upper end of the interval of the loss; without enough samples all that can be lost."""
        if self.samples >= MIN_SAMPLES:
            return self.loss.high
        return 1 - 1 / self.before if self.blocks else 1.0


def certify(rows: Sequence[SampleRows]) -> tuple[DomainResult, ...]:
    """Return the result of every domain in order of appearance, and of all samples where there are several."""
    groups: dict[str, list[SampleRows]] = {}
    for row in rows:
        groups.setdefault(row.domain, []).append(row)
    if len(groups) > 1:
        groups[ALL] = list(rows)
    return tuple(_result(domain, group) for domain, group in groups.items())


def certificate_problems(results: Sequence[DomainResult], limit: float) -> list[str]:
    """List every domain whose loss is not bounded by ``limit``."""
    return [_problem(result, limit) for result in results if not result.bound <= limit]


def certificate_rows(results: Sequence[DomainResult]) -> list[tuple[str, ...]]:
    """Return the rows under ``CERTIFICATE_HEAD``."""
    return [
        (
            result.domain,
            str(result.samples),
            str(result.blocks),
            f"{result.before:.3f}",
            f"{result.after:.3f}",
            f"{result.loss.value:+.2%}",
            _interval_cell(result),
            f"{result.mean_tv:.4f}",
            *_drift_cells(result.confidence),
        )
        for result in results
    ]


def _result(domain: str, rows: Sequence[SampleRows]) -> DomainResult:
    whole = [row for row in rows if row.promised]
    before, after = ([sum(pair[side] for pair in row.promised) for row in whole] for side in (0, 1))
    blocks = sum(len(row.promised) for row in whole)
    return DomainResult(
        domain=domain,
        samples=len(whole),
        blocks=blocks,
        before=sum(before) / blocks if blocks else math.nan,
        after=sum(after) / blocks if blocks else math.nan,
        loss=_loss(before, after),
        mean_tv=mean([tv for row in rows for tv in row.tv]),
        confidence=_drift(rows),
    )


def _loss(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return 1 - after / before over samples, each drafter's sums of expected lengths."""
    if not before:
        return Interval(math.nan, math.nan, math.nan)
    left = bootstrap_ratio(after, before, resample(len(before), RESAMPLES, seed=0))
    return Interval(1 - left.value, 1 - left.high, 1 - left.low)


def _drift(rows: Sequence[SampleRows]) -> ConfidenceDrift | None:
    confidence = torch.tensor([pair for row in rows for pair in row.confidence], dtype=torch.float64)
    if not len(confidence):
        return None
    kept = torch.tensor([pair for row in rows for pair in row.kept], dtype=torch.float64)  # [n, 2], like confidence
    auc = [expected_auc(confidence[:, side], kept[:, side]) for side in (0, 1)]
    brier = [expected_brier(confidence[:, side], kept[:, side]) for side in (0, 1)]
    return ConfidenceDrift(auc[0], auc[1], brier[0], brier[1])


def _interval_cell(result: DomainResult) -> str:
    if result.samples < MIN_SAMPLES:
        return "too few samples"
    return f"{result.loss.low:+.2%} .. {result.loss.high:+.2%}"


def _drift_cells(drift: ConfidenceDrift | None) -> tuple[str, str]:
    if drift is None:
        return "", ""
    return f"{drift.auc_before:.4f}, {drift.auc_after:.4f}", f"{drift.brier_before:.4f}, {drift.brier_after:.4f}"


def _problem(result: DomainResult, limit: float) -> str:
    through = f"export.max_length_change={limit} lets {limit:.2%} through"
    if result.samples < MIN_SAMPLES:
        return (
            f"domain {result.domain!r}: {result.samples} samples hold a whole block, which bounds no loss; {through}. "
            "Put more conversations with long enough answers into data.test, or raise the limit"
        )
    return (
        f"domain {result.domain!r}: the accepted length that it promises is {result.after:.3f} after "
        f"{result.before:.3f}, a loss of {result.loss.value:.2%}, {result.loss.high:.2%} at the upper end of its 95 % "
        f"interval ({result.samples} samples); {through}"
    )
