"""Compare a package, reloaded from disk, with the trained drafter it was made from.

Three comparisons on the same material. *Weights*: each comes back within half a step of its number format.
*Distributions*: both drafters read the same test conversations and are told the same previous tokens, and the total
variation between what they say about each slot is taken; it bounds how much the acceptance of a slot can change, and
the accepted length that whole blocks promise is known to a fraction of a percent. *Accepted length*: both really decode
the same prompts, greedily; a dozen prompts know it to a few percent only, so there the whole interval must lie beyond
what is let through. A package that strays too far is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deepspec.contracts import Committed, Sample
from deepspec.errors import DeepSpecError
from deepspec.evaluation.acceptance import expected_length
from deepspec.evaluation.estimator import ForcedSampler, total_variation
from deepspec.evaluation.statistics import Interval, bootstrap_difference, ratio_of_sums, resample
from deepspec.export.quantise import Profile, layer_linears, rounding_problems
from deepspec.export.states import StateWatch
from deepspec.inference.decoder import DecodingTarget, SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer
from deepspec.log import progress

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor

    from deepspec.drafters.base import Drafter

MEAN_TV_LIMIT: dict[Profile, float] = {"bf16": 0.02, "fp16": 0.005, "fp16_int8": 0.03}
"""Largest mean total variation that is let through. A quickstart drafter (324 steps) shows 0.025 in
fp16_int8. Weights are compared one by one besides."""

RESAMPLES = 2000
ANCHORS_PER_SAMPLE = 8
MAX_SAMPLE_TOKENS = 512
"""Longer samples are cut: the target's logits of a whole sample are held at once."""


class VerificationError(DeepSpecError):
    """The package does not do what the trained drafter does; it was not written."""


@dataclass(frozen=True)
class Material:
    """What the comparison is made on."""

    samples: Sequence[Sample]
    prompts: Sequence[Sequence[int]] = ()
    stop_ids: Collection[int] = ()
    max_new_tokens: int = 64


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
class Lengths:
    """Tokens committed per forward pass of the target, pooled over rounds that the end of the text did not cut."""

    prompts: int
    before: float
    after: float
    rounds_before: int
    rounds_after: int
    change: Interval
    """after - before, paired by prompt."""

    @property
    def loss(self) -> Interval:
        """Share of the accepted length that was lost; negative is a gain."""
        value, low, high = (-bound / self.before for bound in (self.change.value, self.change.high, self.change.low))
        return Interval(value, low, high)


@dataclass(frozen=True)
class Verification:
    """The outcome; ``problems`` is empty when the package may be written."""

    profile: Profile
    distributions: Distributions
    lengths: Lengths | None
    states: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@torch.inference_mode()
def verify(
    before: Drafter,
    after: Drafter,
    target: DecodingTarget,
    material: Material,
    *,
    profile: Profile,
    max_length_change: float,
) -> Verification:
    """Compare ``after`` (the package) with ``before`` (the trained drafter), both bound to ``target``."""
    lengths, texts = compare_lengths(before, after, target, material) if material.prompts else (None, [])
    with StateWatch(before) as states:
        distributions = compare_distributions(before, after, target, material.samples or texts)
    int8 = layer_linears(before) if profile == "fp16_int8" else ()
    problems = rounding_problems(before.state_dict(), after.state_dict(), profile, int8)
    problems += _distribution_problems(distributions, profile)
    problems += _length_problems(distributions, lengths, max_length_change)
    if profile != "bf16":
        problems += states.overflows(torch.float16)
    return Verification(profile, distributions, lengths, dict(states.largest), tuple(problems))


def refuse(verification: Verification, *, force: bool) -> None:
    """Raise when there are problems and ``force`` does not let them through."""
    if verification.problems and not force:
        raise VerificationError(
            "the package was not written:\n"
            + "\n".join(f"  - {problem}" for problem in verification.problems)
            + "\nexport.force=true writes it all the same, and the card says so"
        )


def compare_distributions(
    before: Drafter, after: Drafter, target: DecodingTarget, samples: Sequence[Sample]
) -> Distributions:
    """Compare what the drafters say about the slots of evenly spread blocks of the samples."""
    slots: list[tuple[float, bool]] = []
    promised: list[tuple[float, float]] = []
    for sample in progress(samples, len(samples), "comparing distributions"):
        blocks = zip(_slots(before, target, sample), _slots(after, target, sample), strict=True)
        for (ours, p), (theirs, _) in blocks:  # each [k, V]
            same = ours.argmax(-1) == theirs.argmax(-1)
            slots += list(zip(total_variation(ours, theirs).tolist(), same.tolist(), strict=True))
            kept = [(1 - total_variation(p, q)).tolist() for q in (ours, theirs)]
            if len(ours) == before.conventions.gamma:  # a block that the end of a turn cuts promises less than it would
                promised.append((expected_length(kept[0]), expected_length(kept[1])))
    if not slots:
        raise VerificationError("no sample has two supervised tokens in a row: nothing to compare; check data.test")
    return Distributions(
        slots=len(slots),
        mean_tv=_mean([tv for tv, _ in slots]),
        max_tv=max(tv for tv, _ in slots),
        same_choice=_mean([float(same) for _, same in slots]),
        expected_before=_mean([length for length, _ in promised]),
        expected_after=_mean([length for _, length in promised]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def compare_lengths(
    before: Drafter, after: Drafter, target: DecodingTarget, material: Material
) -> tuple[Lengths, list[Sample]]:
    """Decode the prompts greedily with both drafters; return the texts too."""
    found: list[tuple[list[float], list[float]]] = []  # committed tokens and rounds of each prompt
    texts = []
    for name, drafter in (("trained drafter", before), ("package", after)):
        decoder = SpeculativeDecoder(target, DrafterProposer(drafter))
        committed, rounds = [], []
        for prompt in progress(material.prompts, len(material.prompts), f"decoding with the {name}"):
            generation = decoder.generate(prompt, material.max_new_tokens, stop_ids=material.stop_ids)
            whole = [float(r.committed) for r in generation.rounds if not r.censored]
            committed.append(sum(whole))
            rounds.append(float(len(whole)))
            texts.append(_as_sample(prompt, generation.tokens))
        if not sum(rounds):
            raise VerificationError("every decoded text ended in its first round: give more prompts in data.test")
        found.append((committed, rounds))
    trained, packaged = found
    change = bootstrap_difference(packaged, trained, resample(len(material.prompts), RESAMPLES, seed=0))
    lengths = Lengths(
        prompts=len(material.prompts),
        before=ratio_of_sums(*trained),
        after=ratio_of_sums(*packaged),
        rounds_before=int(sum(trained[1])),
        rounds_after=int(sum(packaged[1])),
        change=change,
    )
    return lengths, texts


def anchors_of(sample: Sample, count: int = ANCHORS_PER_SAMPLE) -> list[int]:
    """Return at most ``count`` evenly spread anchors: supervised tokens with a supervised successor."""
    mask = sample.loss_mask[:MAX_SAMPLE_TOKENS]
    candidates = [a for a in range(1, len(mask) - 1) if mask[a] and mask[a + 1]]
    if len(candidates) <= count:
        return candidates
    return [candidates[n * len(candidates) // count] for n in range(count)]


def verification_rows(verification: Verification) -> list[tuple[str, ...]]:
    """Return the table's rows: what, before, after, change."""
    said, lengths = verification.distributions, verification.lengths
    rows: list[tuple[str, ...]] = []
    if lengths is not None:
        rows.append(_change(f"accepted length, greedy, {lengths.prompts} prompts", lengths.before, lengths.after))
        rows.append(("its change, 95 % interval", "", "", f"{-lengths.loss.high:+.2%} .. {-lengths.loss.low:+.2%}"))
        rows.append(("rounds", str(lengths.rounds_before), str(lengths.rounds_after), ""))
    if not math.isnan(said.expected_before):
        rows.append(_change("expected length, temperature 1", said.expected_before, said.expected_after))
    rows.append((f"mean total variation, {said.slots} slots", "", f"{said.mean_tv:.5f}", ""))
    rows.append(("largest total variation", "", f"{said.max_tv:.5f}", ""))
    rows.append(("same likeliest token", "", f"{said.same_choice:.2%}", ""))
    return rows


def _change(name: str, before: float, after: float) -> tuple[str, ...]:
    return (name, f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.2%}")


def _as_sample(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    return Sample("", (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))


def _slots(drafter: Drafter, target: DecodingTarget, sample: Sample) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what drafter and target say about the slots of each block, both [k, V], given the sample's own tokens."""
    ids = sample.input_ids[:MAX_SAMPLE_TOKENS]
    tokens = torch.tensor([ids], device=target.device)
    stepped = target.step(tokens, target.new_cache(len(ids)), drafter.taps)
    text = Committed(ids, stepped.hidden, stepped.last_hidden)
    state, read = drafter.start(len(ids)), 0
    for anchor in anchors_of(sample):
        drafter.extend(state, text.part(read, anchor))
        read = anchor
        count = _supervised(sample, anchor, drafter.conventions.gamma)
        forced = ForcedSampler(ids[anchor + 1 :], temperature=1.0)
        q = drafter.propose(state, ids[anchor], count, forced).probabilities
        yield q, stepped.logits[anchor : anchor + count].softmax(-1)


def _supervised(sample: Sample, anchor: int, most: int) -> int:
    """Return how many supervised tokens follow ``anchor`` without a gap, ``most`` at most."""
    following = sample.loss_mask[anchor + 1 : min(anchor + 1 + most, MAX_SAMPLE_TOKENS)]
    return next((n for n, supervised in enumerate(following) if not supervised), len(following))


def _distribution_problems(found: Distributions, profile: Profile) -> list[str]:
    limit = MEAN_TV_LIMIT[profile]
    if found.mean_tv <= limit:  # NaN is a problem too
        return []
    return [
        f"its distributions differ from the trained drafter's by a total variation of {found.mean_tv:.4f} on average; "
        f"rounding to {profile} explains {limit} at most"
    ]


def _length_problems(found: Distributions, lengths: Lengths | None, limit: float) -> list[str]:
    through, problems = f"export.max_length_change={limit} lets {limit:.2%} through", []
    promised = 1 - found.expected_after / found.expected_before
    if promised > limit:  # NaN without a whole block
        problems.append(
            f"the accepted length that it promises at temperature 1 is {found.expected_after:.3f} after "
            f"{found.expected_before:.3f}, a loss of {promised:.2%}; {through}"
        )
    if lengths is not None and lengths.loss.low > limit:
        problems.append(
            f"its accepted length is {lengths.after:.3f} after {lengths.before:.3f}, a loss of "
            f"{lengths.loss.low:.2%} .. {lengths.loss.high:.2%} (95 %); {through}"
        )
    return problems
