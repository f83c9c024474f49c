"""How many drafted tokens a target accepts, counted by really decoding prompts.

Accepted length (tau) is tokens committed per forward pass of the target after the prefill, the bonus token included.
Two poolings: per round (all tokens over all rounds) and per request (mean over prompts of each prompt's own).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepspec.evaluation.statistics import Interval, bootstrap_mean, bootstrap_ratio, ratio_of_sums, resample
from deepspec.log import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from deepspec.inference.decoder import Generation, Round, SpeculativeDecoder
    from deepspec.inference.sampling import SamplerSettings

ALL = "all"


@dataclass(frozen=True)
class Prompt:
    """A prompt of the test split, rendered."""

    id: str
    domain: str
    ids: list[int]


@dataclass(frozen=True)
class Decoded:
    """What became of one prompt."""

    prompt: Prompt
    generation: Generation


@dataclass(frozen=True)
class Counted:
    """What one prompt contributes to the accepted length, for comparisons paired by prompt."""

    id: str
    domain: str
    tokens: int
    """Committed after the prefill."""
    rounds: int


@dataclass(frozen=True)
class Position:
    """Slot ``slot`` (1 is the first drafted token): how often it was judged, and kept."""

    slot: int
    judged: int
    accepted: int

    @property
    def rate(self) -> float:
        """Chance to be kept, given that every slot before it was."""
        return self.accepted / self.judged if self.judged else float("nan")


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of a group of prompts."""

    prompts: int
    rounds: int
    tokens: int
    per_round: Interval
    per_request: Interval
    uncensored: float
    """Accepted length from the rates per slot: rounds cut by the end of the text count only as far as they went."""
    positions: list[Position] = field(default_factory=list)


def decode_prompts(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    settings: Callable[[int], SamplerSettings] | SamplerSettings,
    stop_ids: Collection[int],
    gamma: int | None = None,
    what: str = "decode",
) -> list[Decoded]:
    """Decode every prompt; ``settings`` may depend on the prompt's index, so that each has its own seed."""
    decoded = []
    for index, prompt in enumerate(progress(prompts, len(prompts), what)):
        chosen = settings(index) if callable(settings) else settings
        generation = decoder.generate(prompt.ids, max_new_tokens, chosen, stop_ids, gamma)
        decoded.append(Decoded(prompt, generation))
    return decoded


def by_domain(decoded: Sequence[Decoded], resamples: int, seed: int) -> dict[str, Acceptance]:
    """Return the acceptance of each domain in order of appearance, and of all prompts together under ``all``."""
    groups: dict[str, list[Decoded]] = {}
    for item in decoded:
        groups.setdefault(item.prompt.domain, []).append(item)
    if len(groups) != 1:
        groups[ALL] = list(decoded)
    return {name: summarise(group, resamples, seed) for name, group in groups.items()}


def summarise(decoded: Sequence[Decoded], resamples: int, seed: int) -> Acceptance:
    """Return the acceptance of a group of prompts; one without a round after the prefill is left out."""
    used = [d for d in decoded if d.generation.rounds]
    tokens, rounds = committed_and_rounds(used)
    draws = resample(len(used), resamples, seed) if used else resample(1, 0, seed)
    positions = per_position([r for d in used for r in d.generation.rounds])
    return Acceptance(
        prompts=len(used),
        rounds=int(sum(rounds)),
        tokens=int(sum(tokens)),
        per_round=bootstrap_ratio(tokens, rounds, draws),
        per_request=bootstrap_mean([t / r for t, r in zip(tokens, rounds, strict=True)], draws),
        uncensored=expected_length([p.rate for p in positions]),
        positions=positions,
    )


def committed_and_rounds(decoded: Sequence[Decoded]) -> tuple[list[float], list[float]]:
    """Return each prompt's tokens committed after the prefill, and its rounds."""
    tokens = [float(sum(r.committed for r in d.generation.rounds)) for d in decoded]
    return tokens, [float(len(d.generation.rounds)) for d in decoded]


def count_each(decoded: Sequence[Decoded]) -> list[Counted]:
    """Return what each prompt contributes, one without a round after the prefill included."""
    counted = zip(decoded, *committed_and_rounds(decoded), strict=True)
    return [Counted(d.prompt.id, d.prompt.domain, int(tokens), int(rounds)) for d, tokens, rounds in counted]


def accepted_length(decoded: Sequence[Decoded]) -> float:
    """Return tokens committed per forward pass of the target, over all prompts."""
    return ratio_of_sums(*committed_and_rounds(decoded))


def per_position(rounds: Sequence[Round]) -> list[Position]:
    """Count, for every slot, the rounds that judged it and those that kept it.

    A refusal judges one slot more than were accepted; a censored round ends without a refusal, so it does not.
    """
    longest = max((r.drafted for r in rounds), default=0)
    judged = [r.accepted + (0 if r.censored or r.accepted == r.drafted else 1) for r in rounds]
    return [
        Position(slot, sum(j >= slot for j in judged), sum(r.accepted >= slot for r in rounds))
        for slot in range(1, longest + 1)
    ]


def expected_length(rates: Sequence[float]) -> float:
    """Return 1 + r1 + r1 r2 + ...: the mean tokens of a round whose slots are kept with these chances in turn."""
    total, survival = 1.0, 1.0
    for rate in rates:
        if rate != rate:  # noqa: PLR0124 - nan: no round ever came so far
            break
        survival *= rate
        total += survival
    return total
