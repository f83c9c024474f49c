"""Tokens per second of several proposers on the same prompts, one after the other in one process.

The order of the proposers rotates from prompt to prompt, so that a machine that is busy for a while slows all of them.
What is compared are the ratios of pairs: the same prompt, moments apart.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from deepspec.evaluation.statistics import Interval, bootstrap_median, resample
from deepspec.inference.sampling import SamplerSettings
from deepspec.log import progress

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from deepspec.contracts import Committed, Proposal
    from deepspec.evaluation.acceptance import Prompt
    from deepspec.inference.decoder import Generation, SpeculativeDecoder
    from deepspec.inference.proposers import Proposer
    from deepspec.inference.sampling import Sampler

WARM_UP_TOKENS = 8
BASELINE = "plain"


@dataclass(frozen=True)
class Speed:
    """The timing of one proposer."""

    name: str
    tokens_per_second: Interval
    """New tokens over the whole time, prefill included: median over prompts."""
    decode_tokens_per_second: Interval
    """Tokens after the first over the time after the prefill: median over prompts."""
    ratio: Interval
    """Median over prompts of tokens_per_second over that of plain decoding."""
    decode_ratio: Interval
    accepted_length: float
    per_prompt: list[float]


@dataclass(frozen=True)
class DraftTime:
    """How long a drafter takes for a whole block, without taking in the text before it and without the target."""

    milliseconds: Interval
    """Median over prompts of each prompt's median."""
    blocks: int
    per_prompt: list[float]


class ClockedProposer:
    """A proposer whose whole blocks are timed; on CUDA by events, so that the host waits for nothing more."""

    def __init__(self, proposer: Proposer, device: torch.device) -> None:
        self.gamma, self.layer_ids = proposer.gamma, proposer.layer_ids
        self._proposer = proposer
        self._now = partial(_event, device) if device.type == "cuda" else time.perf_counter
        self._marks: list[list[tuple[Any, Any]]] = []

    def start(self, max_length: int) -> None:
        """Begin a new sequence."""
        self._marks.append([])
        self._proposer.start(max_length)

    def extend(self, committed: Committed) -> None:
        """Hand the next committed positions on."""
        self._proposer.extend(committed)

    def propose(self, anchor: int, num_tokens: int, sampler: Sampler) -> Proposal | None:
        """Draft, and note when it began and ended."""
        began = self._now()
        proposal = self._proposer.propose(anchor, num_tokens, sampler)
        if num_tokens == self.gamma:
            self._marks[-1].append((began, self._now()))
        return proposal

    def seconds(self) -> list[list[float]]:
        """Return the seconds of every whole block, a list for each sequence."""
        return [[_between(*marks) for marks in sequence] for sequence in self._marks]


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000.0


def draft_time(sequences: Sequence[Sequence[float]], *, resamples: int, seed: int) -> DraftTime | None:
    """Return the time of a block from the seconds that ``ClockedProposer`` noted, one list a prompt."""
    medians = [1000.0 * median(blocks) for blocks in sequences if blocks]
    if not medians:
        return None
    draws = resample(len(medians), resamples, seed)
    return DraftTime(bootstrap_median(medians, draws), sum(map(len, sequences)), medians)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Use ``threads`` threads of PyTorch; a single one stays on one core where the system allows it."""
    before = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    torch.set_num_threads(threads)
    try:
        if threads == 1 and cores:
            os.sched_setaffinity(0, {max(cores)})
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


def measure(
    decoders: Mapping[str, SpeculativeDecoder],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    settings: SamplerSettings | None = None,
    stop_ids: Collection[int] = (),
    *,
    threads: int = 1,
) -> dict[str, list[Generation]]:
    """Run every decoder on every prompt, timed; ``decoders`` must hold ``plain``, that all are compared with.

    ``threads`` is for the CPU. A GPU needs no waiting for: a round ends when its tokens have reached the host.
    """
    settings = settings or SamplerSettings()
    names = list(decoders)
    runs: dict[str, list[Generation]] = {name: [] for name in names}
    on_cpu = decoders[BASELINE].target.device.type == "cpu"
    with pinned(threads) if on_cpu else nullcontext():
        for decoder in decoders.values():
            decoder.generate(prompts[0].ids, WARM_UP_TOKENS, settings)
        for index, prompt in enumerate(progress(prompts, len(prompts), "time")):
            for name in names[index % len(names) :] + names[: index % len(names)]:
                runs[name].append(decoders[name].generate(prompt.ids, max_new_tokens, settings, stop_ids))
    return runs


def compare(runs: Mapping[str, list[Generation]], *, resamples: int = 2000, seed: int = 0) -> list[Speed]:
    """Return the speed of each decoder that ``measure`` ran."""
    draws = resample(len(runs[BASELINE]), resamples, seed)
    return [_speed(name, timed, runs[BASELINE], draws) for name, timed in runs.items()]


def _speed(name: str, runs: list[Generation], baseline: list[Generation], draws: torch.Tensor) -> Speed:
    whole = [_whole(g) for g in runs]
    decode = [_decode(g) for g in runs]
    rounds = sum(len(g.rounds) for g in runs)
    return Speed(
        name=name,
        tokens_per_second=bootstrap_median(whole, draws),
        decode_tokens_per_second=bootstrap_median(decode, draws),
        ratio=bootstrap_median([a / _whole(b) for a, b in zip(whole, baseline, strict=True)], draws),
        decode_ratio=bootstrap_median([a / _decode(b) for a, b in zip(decode, baseline, strict=True)], draws),
        accepted_length=sum(len(g.tokens) - 1 for g in runs) / rounds if rounds else float("nan"),
        per_prompt=whole,
    )


def _whole(generation: Generation) -> float:
    return len(generation.tokens) / generation.seconds


def _decode(generation: Generation) -> float:
    """Return tokens per second after the prefill; a text that ended with the first token counts as the whole."""
    seconds = generation.seconds - generation.prefill_seconds
    return (len(generation.tokens) - 1) / seconds if generation.rounds else _whole(generation)
