"""Compare a package, reloaded from disk, with the trained drafter it was made from.

Two comparisons, at fixed weights and on the same material. *Distributions*: both drafters read the same tokens of the
test conversations and are told the same previous tokens, and the total variation between what they say about each slot
is taken; it bounds how much the acceptance of a slot can change. *Accepted length*: both really decode the same
prompts, greedily. A package that strays too far is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from deepspec.contracts import Sample
from deepspec.errors import DeepSpecError
from deepspec.export.states import StateWatch
from deepspec.inference.decoder import DecodingTarget, SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer
from deepspec.log import progress

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor

    from deepspec.drafters.base import Drafter
    from deepspec.export.quantise import Profile

MEAN_TV_LIMIT: dict[Profile, float] = {"bf16": 0.02, "fp16": 0.005, "fp16_int8": 0.03}
"""Largest mean total variation that rounding explains. Measured on trained and random drafters it stays well below
half of this; a fault (a lost scale, a swapped matrix) is far above."""


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


@dataclass(frozen=True)
class Lengths:
    """Tokens committed per forward pass of the target, pooled over rounds that the end of the text did not cut."""

    prompts: int
    before: float
    after: float
    rounds_before: int
    rounds_after: int

    @property
    def loss(self) -> float:
        """Share of the accepted length that was lost; negative is a gain."""
        return 1 - self.after / self.before


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
    problems = [*_distribution_problems(distributions, profile), *_length_problems(lengths, max_length_change)]
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
    """Take the total variation of every slot of evenly spread blocks of the samples."""
    slots: list[tuple[float, bool]] = []
    for sample in progress(samples, len(samples), "comparing distributions"):
        said = (_draft_logits(drafter, target, sample) for drafter in (before, after))
        for ours, theirs in zip(*said, strict=True):  # each [k, V]
            tv = 0.5 * (ours.softmax(-1) - theirs.softmax(-1)).abs().sum(-1)  # [k]
            same = ours.argmax(-1) == theirs.argmax(-1)
            slots += list(zip(tv.tolist(), same.tolist(), strict=True))
    if not slots:
        raise VerificationError("no sample has two supervised tokens in a row: nothing to compare; check data.test")
    values = [tv for tv, _ in slots]
    return Distributions(
        len(slots), math.fsum(values) / len(slots), max(values), sum(same for _, same in slots) / len(slots)
    )


def compare_lengths(
    before: Drafter, after: Drafter, target: DecodingTarget, material: Material
) -> tuple[Lengths, list[Sample]]:
    """Decode the prompts greedily with both drafters; return the texts too."""
    found, texts = [], []
    for name, drafter in (("trained drafter", before), ("package", after)):
        decoder = SpeculativeDecoder(target, DrafterProposer(drafter))
        rounds = []
        for prompt in progress(material.prompts, len(material.prompts), f"decoding with the {name}"):
            generation = decoder.generate(prompt, material.max_new_tokens, stop_ids=material.stop_ids)
            rounds += generation.rounds
            texts.append(_as_sample(prompt, generation.tokens))
        whole = [r.committed for r in rounds if not r.censored]
        if not whole:
            raise VerificationError("every decoded text ended in its first round: give more prompts in data.test")
        found.append((sum(whole) / len(whole), len(whole)))
    (length_before, rounds_before), (length_after, rounds_after) = found
    return Lengths(len(material.prompts), length_before, length_after, rounds_before, rounds_after), texts


def anchors_of(sample: Sample, count: int = ANCHORS_PER_SAMPLE) -> list[int]:
    """Return at most ``count`` evenly spread anchors: supervised tokens with a supervised successor."""
    mask = sample.loss_mask[:MAX_SAMPLE_TOKENS]
    candidates = [a for a in range(1, len(mask) - 1) if mask[a] and mask[a + 1]]
    if len(candidates) <= count:
        return candidates
    return [candidates[n * len(candidates) // count] for n in range(count)]


def verification_rows(verification: Verification) -> list[tuple[str, ...]]:
    """Return the table's rows: what, before, after, change."""
    rows: list[tuple[str, ...]] = []
    if (lengths := verification.lengths) is not None:
        change = f"{lengths.after / lengths.before - 1:+.2%}"
        name = f"accepted length, {lengths.prompts} prompts"
        rows.append((name, f"{lengths.before:.3f}", f"{lengths.after:.3f}", change))
        rows.append(("rounds", str(lengths.rounds_before), str(lengths.rounds_after), ""))
    said = verification.distributions
    rows.append((f"mean total variation, {said.slots} slots", "", f"{said.mean_tv:.5f}", ""))
    rows.append(("largest total variation", "", f"{said.max_tv:.5f}", ""))
    rows.append(("same likeliest token", "", f"{said.same_choice:.2%}", ""))
    return rows


class _ForcedSampler:
    """Says the tokens of the text whatever the logits are, and keeps the logits."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.logits = tokens, list[torch.Tensor]()

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.tensor(self.tokens[len(self.logits)], device=logits.device)
        self.logits.append(logits.float())
        return token, self.logits[-1].softmax(-1)


def _as_sample(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    return Sample("", (*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))


def _draft_logits(drafter: Drafter, target: DecodingTarget, sample: Sample) -> Iterator[Tensor]:
    """Yield what the drafter says about the slots of each block, [k, V] fp32, given the sample's own tokens."""
    ids, gamma = sample.input_ids[:MAX_SAMPLE_TOKENS], drafter.conventions.gamma
    tokens = torch.tensor([ids], device=target.device)
    hidden = target.step(tokens, target.new_cache(len(ids)), drafter.conventions.target_layer_ids).hidden  # [T, C*D]
    state, read = drafter.start(len(ids)), 0
    for anchor in anchors_of(sample):
        drafter.extend(state, hidden[read:anchor])
        read = anchor
        following = ids[anchor + 1 : anchor + 1 + gamma]
        sampler = _ForcedSampler(following)
        drafter.propose(state, ids[anchor], len(following), sampler)
        yield torch.stack(sampler.logits)


def _distribution_problems(found: Distributions, profile: Profile) -> list[str]:
    limit = MEAN_TV_LIMIT[profile]
    if found.mean_tv <= limit:  # NaN is a problem too
        return []
    return [
        f"its distributions differ from the trained drafter's by a total variation of {found.mean_tv:.4f} on average; "
        f"rounding to {profile} explains {limit} at most"
    ]


def _length_problems(lengths: Lengths | None, limit: float) -> list[str]:
    if lengths is None or lengths.loss <= limit:
        return []
    return [
        f"its accepted length is {lengths.after:.3f} after {lengths.before:.3f}, a loss of {lengths.loss:.2%}; "
        f"export.max_length_change={limit} lets {limit:.2%} through"
    ]
