"""Let two drafters of one target, the trained one and its package, work on the same text.

*Teacher-forced*: both read the same samples and are told the same previous tokens, so that every number of one has its
partner. *Decoding*: both draft for the same prompts, greedily, one beside the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch

from deepspec.contracts import Committed, Sample
from deepspec.data.prompts import domain_of
from deepspec.errors import DeepSpecError
from deepspec.evaluation.acceptance import expected_length
from deepspec.evaluation.estimator import ForcedSampler, total_variation
from deepspec.evaluation.statistics import (
    Interval,
    bootstrap_difference,
    bootstrap_median,
    ratio_of_sums,
    resample,
)
from deepspec.export.states import StateWatch
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer
from deepspec.log import progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from deepspec.contracts import Proposal
    from deepspec.drafters.base import Drafter
    from deepspec.export.verify import Material
    from deepspec.inference.decoder import DecodingTarget, Generation, Stepped

RESAMPLES = 2000
ANCHORS_PER_SAMPLE = 8
MAX_SAMPLE_TOKENS = 512
"""Longer samples are cut: the target's logits of a whole sample are held at once."""
WARM_UP_TOKENS = 4


class VerificationError(DeepSpecError):
    """The package does not do what the trained drafter does; it was not written."""


@dataclass(frozen=True)
class SampleRows:
    """What both drafters say about one sample: pairs are (trained drafter, package)."""

    domain: str
    tv: list[float] = field(default_factory=list)
    """Total variation between the two distributions, slot by slot."""
    same: list[bool] = field(default_factory=list)
    """Whether both find the same token likeliest."""
    kept: list[tuple[float, float]] = field(default_factory=list)
    """Chance that the target keeps the slot, given that it kept those before."""
    confidence: list[tuple[float, float]] = field(default_factory=list)
    """What the confidence heads say that chance is; empty without one."""
    promised: list[tuple[float, float]] = field(default_factory=list)
    """Expected accepted length of each whole block; one that the end of a turn cuts promises less than it would."""

    def add(self, before: Proposal, after: Proposal, p: Tensor, *, whole: bool) -> None:
        """Take in one block: two proposals of k tokens, and the target's distributions ``p`` [k, V]."""
        ours, theirs = before.probabilities, after.probabilities
        self.tv.extend(total_variation(ours, theirs).tolist())
        self.same.extend((ours.argmax(-1) == theirs.argmax(-1)).tolist())
        kept = [(1 - total_variation(p, q)).tolist() for q in (ours, theirs)]
        self.kept.extend(zip(*kept, strict=True))
        if before.confidence is not None and after.confidence is not None:
            self.confidence.extend(zip(before.confidence.tolist(), after.confidence.tolist(), strict=True))
        if whole:
            self.promised.append((expected_length(kept[0]), expected_length(kept[1])))


@dataclass(frozen=True)
class Distributions:
    """Total variation between the drafters' distributions, over all compared slots."""

    slots: int
    mean_tv: float
    max_tv: float
    same_choice: float  # share of slots where both find the same token likeliest
    expected_before: float  # accepted length that whole blocks promise at temperature 1; nan without one
    expected_after: float


@dataclass(frozen=True)
class DecodeTime:
    """Milliseconds per token after the prefill, medians over prompts; for the reader, never judged."""

    before: float
    after: float
    ratio: Interval
    """after / before, paired by prompt."""


@dataclass(frozen=True)
class Lengths:
    """Tokens committed per forward pass of the target, pooled over rounds that the end of the text did not cut."""

    prompts: int
    before: float
    after: float
    rounds_before: int
    rounds_after: int
    change: Interval
    """after - before, paired by prompt."""
    time: DecodeTime | None = None

    @property
    def loss(self) -> Interval:
        """Share of the accepted length that was lost; negative is a gain."""
        value, low, high = (-bound / self.before for bound in (self.change.value, self.change.high, self.change.low))
        return Interval(value, low, high)


def read_samples(
    before: Drafter, after: Drafter, target: DecodingTarget, samples: Sequence[Sample]
) -> list[SampleRows]:
    """Compare what the drafters say about the slots of evenly spread blocks of the samples.

    Raises:
        VerificationError: No sample has a slot.
    """
    rows = [_read(before, after, target, s) for s in progress(samples, len(samples), "comparing distributions")]
    if not any(row.tv for row in rows):
        raise VerificationError("no sample has two supervised tokens in a row: nothing to compare; check data.test")
    return rows


def summarise(rows: Sequence[SampleRows]) -> Distributions:
    """Return the comparison over all slots."""
    tv = [value for row in rows for value in row.tv]
    promised = [pair for row in rows for pair in row.promised]
    return Distributions(
        slots=len(tv),
        mean_tv=mean(tv),
        max_tv=max(tv),
        same_choice=mean([float(same) for row in rows for same in row.same]),
        expected_before=mean([length for length, _ in promised]),
        expected_after=mean([length for _, length in promised]),
    )


def mean(values: Sequence[float]) -> float:
    """Return the mean; nan of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def compare_lengths(
    before: Drafter, after: Drafter, target: DecodingTarget, material: Material
) -> tuple[Lengths, list[Sample]]:
    """Decode the prompts greedily with both drafters; return the texts too."""
    runs = _decode(before, after, target, material)
    trained, packaged = (_committed_and_rounds(generations) for generations in runs)
    if not (sum(trained[1]) and sum(packaged[1])):
        raise VerificationError("every decoded text ended in its first round: give more prompts in data.test")
    draws = resample(len(material.prompts), RESAMPLES, seed=0)
    lengths = Lengths(
        prompts=len(material.prompts),
        before=ratio_of_sums(*trained),
        after=ratio_of_sums(*packaged),
        rounds_before=int(sum(trained[1])),
        rounds_after=int(sum(packaged[1])),
        change=bootstrap_difference(packaged, trained, draws),
        time=_time(*runs),
    )
    domains = material.prompt_domains or [""] * len(material.prompts)
    texts = [
        _as_sample(prompt, generation.tokens, domain)
        for generations in runs
        for prompt, generation, domain in zip(material.prompts, generations, domains, strict=True)
    ]
    return lengths, texts


@torch.inference_mode()
def wide_states(drafter: Drafter, target: DecodingTarget, material: Material, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the modules of ``drafter`` whose states on ``material`` are beyond ``dtype``."""
    with StateWatch(drafter) as states:
        if material.samples:
            for sample in progress(material.samples, len(material.samples), "measuring states"):
                list(_proposals(drafter, sample, _step(target, drafter, sample)))
        decoder = SpeculativeDecoder(target, DrafterProposer(drafter))
        for prompt in () if material.samples else material.prompts:
            decoder.generate(prompt, material.max_new_tokens, stop_ids=material.stop_ids)
    return states.wide(dtype)


def anchors_of(sample: Sample, count: int = ANCHORS_PER_SAMPLE) -> list[int]:
    """Return at most ``count`` evenly spread anchors: supervised tokens with a supervised successor."""
    mask = sample.loss_mask[:MAX_SAMPLE_TOKENS]
    candidates = [a for a in range(1, len(mask) - 1) if mask[a] and mask[a + 1]]
    if len(candidates) <= count:
        return candidates
    return [candidates[n * len(candidates) // count] for n in range(count)]


def _decode(
    before: Drafter, after: Drafter, target: DecodingTarget, material: Material
) -> tuple[list[Generation], list[Generation]]:
    """Decode every prompt with both drafters, taking turns in who comes first."""
    decoders = [SpeculativeDecoder(target, DrafterProposer(drafter)) for drafter in (before, after)]
    runs: tuple[list[Generation], list[Generation]] = ([], [])
    for decoder in decoders:
        decoder.generate(material.prompts[0], WARM_UP_TOKENS)
    for index, prompt in enumerate(progress(material.prompts, len(material.prompts), "decoding with both drafters")):
        for which in (index % 2, 1 - index % 2):
            generation = decoders[which].generate(prompt, material.max_new_tokens, stop_ids=material.stop_ids)
            runs[which].append(generation)
    return runs


def _committed_and_rounds(generations: Sequence[Generation]) -> tuple[list[float], list[float]]:
    """Return each prompt's tokens committed in whole rounds, and those rounds."""
    whole = [[float(r.committed) for r in generation.rounds if not r.censored] for generation in generations]
    return [sum(rounds) for rounds in whole], [float(len(rounds)) for rounds in whole]


def _time(before: Sequence[Generation], after: Sequence[Generation]) -> DecodeTime | None:
    """Return the time per token of the prompts that had a round, None without one."""
    pairs = [(_milliseconds(a), _milliseconds(b)) for a, b in zip(before, after, strict=True) if a.rounds and b.rounds]
    if not pairs:
        return None
    ratios = [theirs / ours for ours, theirs in pairs]
    ratio = bootstrap_median(ratios, resample(len(ratios), RESAMPLES, seed=0))
    return DecodeTime(median(ours for ours, _ in pairs), median(theirs for _, theirs in pairs), ratio)


def _milliseconds(generation: Generation) -> float:
    return 1000.0 * (generation.seconds - generation.prefill_seconds) / (len(generation.tokens) - 1)


def _as_sample(prompt: Sequence[int], answer: Sequence[int], domain: str) -> Sample:
    return Sample("", (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer), domain)


def _read(before: Drafter, after: Drafter, target: DecodingTarget, sample: Sample) -> SampleRows:
    stepped = _step(target, before, sample)
    rows = SampleRows(domain_of(sample.source))
    both = zip(_proposals(before, sample, stepped), _proposals(after, sample, stepped), strict=True)
    for (anchor, ours), (_, theirs) in both:
        count = len(ours.probabilities)
        p = stepped.logits[anchor : anchor + count].softmax(-1)
        rows.add(ours, theirs, p, whole=count == before.conventions.gamma)
    return rows


def _step(target: DecodingTarget, drafter: Drafter, sample: Sample) -> Stepped:
    ids = sample.input_ids[:MAX_SAMPLE_TOKENS]
    return target.step(torch.tensor([ids], device=target.device), target.new_cache(len(ids)), drafter.taps)


def _proposals(drafter: Drafter, sample: Sample, stepped: Stepped) -> Iterator[tuple[int, Proposal]]:
    """Yield each anchor with what the drafter proposes there, told the sample's own tokens."""
    ids = sample.input_ids[:MAX_SAMPLE_TOKENS]
    text = Committed(ids, stepped.hidden, stepped.last_hidden)
    state, read = drafter.start(len(ids)), 0
    for anchor in anchors_of(sample):
        drafter.extend(state, text.part(read, anchor))
        read = anchor
        count = _supervised(sample, anchor, drafter.conventions.gamma)
        forced = ForcedSampler(ids[anchor + 1 :], temperature=1.0)
        yield anchor, drafter.propose(state, ids[anchor], count, forced)


def _supervised(sample: Sample, anchor: int, most: int) -> int:
    """Return how many supervised tokens follow ``anchor`` without a gap, ``most`` at most."""
    following = sample.loss_mask[anchor + 1 : min(anchor + 1 + most, MAX_SAMPLE_TOKENS)]
    return next((n for n, supervised in enumerate(following) if not supervised), len(following))
