"""What the finished runs of a study say, pooled by variant and compared with the baseline.

A prompt is the unit that is drawn: its tokens and rounds are summed over the seeds of a variant, and the same draw of
prompts serves every variant, which makes the differences paired. How far seeds move the accepted length is estimated
apart, from the variants that have several.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

from deepspec.comparison.plan import other_course
from deepspec.comparison.state import is_trained, newest_checkpoint, read_json, read_report
from deepspec.drafters.files import TENSORS, read_header
from deepspec.evaluation.acceptance import ALL, Position, expected_length
from deepspec.evaluation.run import SPECULATIVE
from deepspec.evaluation.speed import BASELINE
from deepspec.evaluation.statistics import (
    Interval,
    bootstrap_difference,
    bootstrap_median,
    bootstrap_ratio,
    ratio_of_sums,
    resample,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.comparison.plan import PlannedRun
    from deepspec.comparison.work import Failure
    from deepspec.config.study import StudyConfig

RESAMPLES = 2000
MADE_BY = ("machine", "torch", "python", "commit")
SEPARATOR = " and "
STANDARD_ERRORS = 2.0
"""A difference has to be larger than so many standard errors of the seeds."""

Counts = dict[str, tuple[float, float]]  # prompt id -> tokens, rounds


@dataclass(frozen=True)
class RunResult:
    """What one finished run says."""

    run: str
    seed: int
    counts: Counts
    domains: dict[str, str]
    """Prompt id -> domain."""
    positions: list[Position]
    training_seconds: float | None
    parameters: int
    draft_ms: list[float]
    """Milliseconds of a block, by timed prompt."""
    speed_ratios: list[float]
    """Tokens per second over those of plain decoding, by timed prompt."""
    made_by: dict[str, str] = field(default_factory=dict)
    """Machine, versions and commit of its evaluation."""

    @property
    def accepted_length(self) -> float:
        """Tokens per forward pass of the target, over all prompts."""
        return ratio_of_sums(*_columns(self.counts))


@dataclass(frozen=True)
class Gain:
    """A variant's accepted length minus the baseline's, paired by prompt."""

    difference: Interval
    seed_error: float | None
    """Standard error that seeds alone give the difference; None where no variant has several."""

    @property
    def beyond_prompts(self) -> bool:
        """Whether the interval over prompts leaves out 0."""
        return not self.difference.low <= 0.0 <= self.difference.high

    @property
    def beyond_seeds(self) -> bool | None:
        """Whether the difference is larger than what seeds do; None where that is not known."""
        return None if self.seed_error is None else abs(self.difference.value) > STANDARD_ERRORS * self.seed_error


@dataclass(frozen=True)
class VariantResult:
    """The finished runs of one variant together."""

    name: str
    seeds: int
    """Planned; ``by_seed`` holds those that are finished."""
    accepted: dict[str, Interval]
    """Accepted length per domain, and of all prompts under ``all``."""
    by_seed: dict[int, float]
    spread: float | None
    """Standard deviation over seeds."""
    gain: Gain | None
    positions: list[Position]
    uncensored: float
    training_minutes: float | None
    """Mean over seeds."""
    parameters: int
    draft_ms: Interval
    speed_ratio: Interval


@dataclass(frozen=True)
class Comparison:
    """A study's results so far."""

    study: str
    baseline: str
    prompts: int
    variants: list[VariantResult]
    missing: dict[str, str] = field(default_factory=dict)
    """Run -> why there is nothing of it."""
    notes: list[str] = field(default_factory=list)
    made_by: dict[str, str] = field(default_factory=dict)
    """Machine, versions and commit of all runs; where they differ, each of them."""


def gather(study: StudyConfig, runs: Sequence[PlannedRun], failures: Sequence[Failure]) -> Comparison:
    """Read every run that is finished, compare the variants, and say why the others are missing."""
    planned = {name: len(variant.seeds) for name, variant in study.variants.items()}
    results: dict[str, list[RunResult]] = {name: [] for name in planned}
    missing: dict[str, str] = {}
    reasons = {failure.run: f"{failure.stage} failed: {failure.reason}" for failure in failures}
    for run in runs:
        result = read_result(run)
        if result is None:
            missing[run.name] = reasons.get(run.name) or ("not evaluated yet" if is_trained(run) else "not trained yet")
        else:
            results[run.variant].append(result)
    found = compare(study.name, study.baseline, planned, results)
    courses = list(other_course(study, {run.variant: run.config for run in runs}))
    made_by = _made_by([result for several in results.values() for result in several])
    apart = [f"{name} differs among the runs: {value}" for name, value in made_by.items() if SEPARATOR in value]
    return replace(found, missing=missing, notes=[*found.notes, *courses, *apart], made_by=made_by)


def _made_by(results: Sequence[RunResult]) -> dict[str, str]:
    """Return each fact once, or every value that it has."""
    values = {name: sorted({r.made_by[name] for r in results if name in r.made_by}) for name in MADE_BY}
    return {name: SEPARATOR.join(several) for name, several in values.items() if several}


def read_result(run: PlannedRun) -> RunResult | None:
    """Return what a run says; None unless it is trained and evaluated as planned."""
    record, checkpoint = read_report(run), newest_checkpoint(run)
    if not record or checkpoint is None or not is_trained(run):
        return None
    scores, progress = record["scores"], read_json(checkpoint / "state.json").get("progress", {})
    groups = scores["acceptance"]
    whole = groups.get(ALL) or next(iter(groups.values()))
    return RunResult(
        run=run.name,
        seed=run.seed,
        counts={p["id"]: (float(p["tokens"]), float(p["rounds"])) for p in scores["prompts"]},
        domains={p["id"]: p["domain"] for p in scores["prompts"]},
        positions=[Position(**p) for p in whole["positions"]],
        training_seconds=progress.get("seconds"),
        parameters=_parameters(read_header(checkpoint / TENSORS)),
        draft_ms=(scores["draft"] or {}).get("per_prompt", []),
        speed_ratios=_speed_ratios(scores["speed"]),
        made_by={name: record["subject"][name] for name in MADE_BY if name in record["subject"]},
    )


def compare(
    study: str, baseline: str, planned: dict[str, int], results: dict[str, list[RunResult]], resamples: int = RESAMPLES
) -> Comparison:
    """Pool the results of each variant, and set them against the baseline's.

    Args:
        study: its name.
        baseline: a variant.
        planned: runs of each variant, in the order of the table.
        results: those that are finished, by variant.
        resamples: of the bootstrap.
    """
    found = {name: results[name] for name in planned if results.get(name)}
    notes = []
    first = next(iter(found.values()), [])
    ids = list((found.get(baseline) or first)[0].counts) if found else []
    like = {name: [r for r in runs if set(r.counts) == set(ids)] for name, runs in found.items()}
    for name in found:
        odd = [r.run for r in found[name] if r not in like[name]]
        notes += [f"{run} was evaluated on other prompts and is left out" for run in odd]
    deviation = seed_deviation([[r.accepted_length for r in runs] for runs in like.values()])
    reference = like.get(baseline, [])
    variants = [
        _variant(name, planned[name], runs, None if name == baseline else reference, deviation, ids, resamples)
        for name, runs in like.items()
        if runs
    ]
    return Comparison(study, baseline, len(ids), variants, notes=notes)


def seed_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation over seeds, pooled over the groups that have several; None when none has."""
    squares = [(x - sum(g) / len(g)) ** 2 for g in groups for x in g]
    freedom = sum(len(g) - 1 for g in groups)
    return sqrt(sum(squares) / freedom) if freedom > 0 else None


def _variant(
    name: str,
    seeds: int,
    runs: list[RunResult],
    reference: list[RunResult] | None,
    deviation: float | None,
    ids: list[str],
    resamples: int,
) -> VariantResult:
    counts = _pooled(runs, ids)
    gain = None
    if reference:
        draws = resample(len(ids), resamples, seed=0)
        difference = bootstrap_difference(_columns(counts), _columns(_pooled(reference, ids)), draws)
        error = None if deviation is None else deviation * sqrt(1 / len(runs) + 1 / len(reference))
        gain = Gain(difference, error)
    positions = _pooled_positions(runs)
    times = [r.training_seconds / 60.0 for r in runs if r.training_seconds]
    lengths = {r.seed: r.accepted_length for r in runs}
    return VariantResult(
        name=name,
        seeds=seeds,
        accepted=_by_domain(counts, runs[0].domains, resamples),
        by_seed=lengths,
        spread=seed_deviation([list(lengths.values())]),
        gain=gain,
        positions=positions,
        uncensored=expected_length([p.rate for p in positions]),
        training_minutes=sum(times) / len(times) if times else None,
        parameters=runs[0].parameters,
        draft_ms=_median([r.draft_ms for r in runs], resamples),
        speed_ratio=_median([r.speed_ratios for r in runs], resamples),
    )


def _pooled(runs: Sequence[RunResult], ids: Sequence[str]) -> Counts:
    """Sum tokens and rounds of each prompt over the seeds."""
    return {i: (sum(r.counts[i][0] for r in runs), sum(r.counts[i][1] for r in runs)) for i in ids}


def _columns(counts: Counts) -> tuple[list[float], list[float]]:
    return [tokens for tokens, _ in counts.values()], [rounds for _, rounds in counts.values()]


def _by_domain(counts: Counts, domains: dict[str, str], resamples: int) -> dict[str, Interval]:
    names = list(dict.fromkeys(domains.values()))
    groups = {name: {i: c for i, c in counts.items() if domains[i] == name} for name in names}
    if len(names) > 1:
        groups[ALL] = counts
    return {
        name: bootstrap_ratio(*_columns(group), resample(len(group), resamples, seed=0))
        for name, group in groups.items()
    }


def _pooled_positions(runs: Sequence[RunResult]) -> list[Position]:
    slots = sorted({p.slot for r in runs for p in r.positions})
    found = [[p for r in runs for p in r.positions if p.slot == slot] for slot in slots]
    return [Position(group[0].slot, sum(p.judged for p in group), sum(p.accepted for p in group)) for group in found]


def _median(columns: Sequence[Sequence[float]], resamples: int) -> Interval:
    """Return the median over timed prompts of each one's mean over seeds; nan where nothing was timed."""
    shortest = min(map(len, columns), default=0)
    means = [sum(column[i] for column in columns) / len(columns) for i in range(shortest)]
    return bootstrap_median(means, resample(max(1, shortest), resamples, seed=0))


def _speed_ratios(speeds: Sequence[dict[str, Any]]) -> list[float]:
    found = {speed["name"]: speed["per_prompt"] for speed in speeds}
    if BASELINE not in found or SPECULATIVE not in found:
        return []
    return [mine / plain for mine, plain in zip(found[SPECULATIVE], found[BASELINE], strict=True)]


def _parameters(header: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """Count the numbers that were trained: the map of a reduced vocabulary is whole numbers."""
    return sum(prod(shape) for shape, kind in header.values() if "float" in kind)
