"""Compare a package, reloaded from disk, with the trained drafter it was made from.

Four comparisons on the same material. *Weights*: each comes back within half a step of its number format.
*Distributions*: both drafters read the same test conversations and are told the same previous tokens, and the total
variation between what they say about each slot is taken; it bounds how much the acceptance of a slot can change.
*Certificate*: the accepted length that whole blocks promise is known to a fraction of a percent, and its loss is
bounded domain by domain. *Accepted length*: both really decode the same prompts, greedily; a dozen prompts know it to a
few percent only, so there the whole interval must lie beyond what is let through. A package that strays too far is
refused.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from deepspec.export.certificate import certificate_problems, certify
from deepspec.export.compare import VerificationError, compare_lengths, read_samples, summarise
from deepspec.export.rounding import rounding_problems
from deepspec.export.states import StateWatch

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from contextlib import AbstractContextManager

    from deepspec.contracts import Sample
    from deepspec.drafters.base import Drafter
    from deepspec.export.certificate import DomainResult
    from deepspec.export.compare import DecodeTime, Distributions, Lengths
    from deepspec.inference.decoder import DecodingTarget
    from deepspec.inference.package_config import PackageConfig
    from deepspec.inference.profiles import Profile

MEAN_TV_LIMIT: dict[Profile, float] = {
    "bf16": 0.02,
    "fp16": 0.005,
    "fp16_int8": 0.04,
    "fp16_int8_full": 0.04,
    "int8_dynamic": 0.08,
    "int4_mlp": 0.2,
}
"""Largest mean total variation that is let through: what rounding explains at most, so that a fault shows. A drafter of
the quickstart (324 steps) shows 0.004 in bf16, 0.024 to 0.050 in 8 bits, 0.063 in 4, and 0.16 in 4 where each value is
rounded by itself. Weights are compared one by one besides."""


@dataclass(frozen=True)
class Material:
    """What the comparison is made on."""

    samples: Sequence[Sample]
    prompts: Sequence[Sequence[int]] = ()
    stop_ids: Collection[int] = ()
    max_new_tokens: int = 64
    prompt_domains: Sequence[str] = ()
    """Of each prompt; empty: all are of one."""


@dataclass(frozen=True)
class Verification:
    """The outcome; ``problems`` is empty when the package may be written."""

    profile: Profile
    distributions: Distributions
    lengths: Lengths | None
    domains: tuple[DomainResult, ...] = ()
    states: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@torch.inference_mode()
def verify(
    before: Drafter,
    after: Drafter,
    target: DecodingTarget,
    material: Material,
    *,
    config: PackageConfig,
    max_length_change: float,
) -> Verification:
    """Compare ``after`` (the package that ``config`` describes) with ``before`` (the trained drafter).

    Both are bound to ``target``.
    """
    states = StateWatch(before)
    found = compare_drafters(
        before, after, target, material, profile=config.profile, max_length_change=max_length_change, watch=states
    )
    problems = [*rounding_problems(before.state_dict(), after.state_dict(), config), *found.problems]
    if config.dtype == "float16":
        problems += states.overflows(torch.float16, config.bfloat16.states)
    return replace(found, states=states.largest, problems=tuple(problems))


@torch.inference_mode()
def compare_drafters(
    before: Drafter,
    after: Drafter,
    target: DecodingTarget,
    material: Material,
    *,
    profile: Profile,
    max_length_change: float,
    watch: AbstractContextManager[object] | None = None,
) -> Verification:
    """Compare what both draft, whatever ``after`` stores; ``profile`` says how much it is rounded.

    ``watch`` is open while samples are read, not while decoding is timed.
    """
    lengths, texts = compare_lengths(before, after, target, material) if material.prompts else (None, [])
    with watch or nullcontext():
        rows = read_samples(before, after, target, material.samples or texts)
    distributions, domains = summarise(rows), certify(rows)
    problems = _distribution_problems(distributions, profile)
    problems += certificate_problems(domains, max_length_change)
    problems += _length_problems(lengths, max_length_change) if lengths else []
    return Verification(profile, distributions, lengths, domains, problems=tuple(problems))


def refuse(verification: Verification, *, force: bool) -> None:
    """Raise when there are problems and ``force`` does not let them through."""
    if verification.problems and not force:
        raise VerificationError(
            "the package was not written:\n"
            + "\n".join(f"  - {problem}" for problem in verification.problems)
            + "\nexport.force=true writes it all the same, and the card says so"
        )


def verification_rows(verification: Verification) -> list[tuple[str, ...]]:
    """Return the table's rows: what, before, after, change."""
    said, lengths = verification.distributions, verification.lengths
    rows: list[tuple[str, ...]] = []
    if lengths is not None:
        rows.append(_change(f"accepted length, greedy, {lengths.prompts} prompts", lengths.before, lengths.after))
        rows.append(("its change, 95 % interval", "", "", f"{-lengths.loss.high:+.2%} .. {-lengths.loss.low:+.2%}"))
        rows.append(("rounds", str(lengths.rounds_before), str(lengths.rounds_after), ""))
        rows += _time_rows(lengths.time)
    if not math.isnan(said.expected_before):
        rows.append(_change("expected length, temperature 1", said.expected_before, said.expected_after))
    rows.append((f"mean total variation, {said.slots} slots", "", f"{said.mean_tv:.5f}", ""))
    rows.append(("largest total variation", "", f"{said.max_tv:.5f}", ""))
    rows.append(("same likeliest token", "", f"{said.same_choice:.2%}", ""))
    return rows


def _change(name: str, before: float, after: float) -> tuple[str, ...]:
    return (name, f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.2%}")


def _time_rows(time: DecodeTime | None) -> list[tuple[str, ...]]:
    if time is None:
        return []
    change = f"{time.ratio.low - 1:+.1%} .. {time.ratio.high - 1:+.1%}"
    return [("ms per token, medians", f"{time.before:.2f}", f"{time.after:.2f}", change)]


def _distribution_problems(found: Distributions, profile: Profile) -> list[str]:
    limit = MEAN_TV_LIMIT[profile]
    if found.mean_tv <= limit:  # NaN is a problem too
        return []
    return [
        f"its distributions differ from the trained drafter's by a total variation of {found.mean_tv:.4f} on average; "
        f"rounding to {profile} explains {limit} at most"
    ]


def _length_problems(lengths: Lengths, limit: float) -> list[str]:
    if not lengths.loss.low > limit:
        return []
    return [
        f"its accepted length is {lengths.after:.3f} after {lengths.before:.3f}, a loss of {lengths.loss.low:.2%} .. "
        f"{lengths.loss.high:.2%} (95 %); export.max_length_change={limit} lets {limit:.2%} through"
    ]
