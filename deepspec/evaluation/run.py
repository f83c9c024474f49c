"""Score a drafter on prompts: acceptance, the lossless check, speed, and one answer to look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from deepspec.errors import ConfigError
from deepspec.evaluation.acceptance import (
    Acceptance,
    Counted,
    Decoded,
    Prompt,
    by_domain,
    committed_and_rounds,
    count_each,
    decode_prompts,
)
from deepspec.evaluation.estimator import estimate
from deepspec.evaluation.lossless import LosslessReport, compare_greedy
from deepspec.evaluation.replay import replay
from deepspec.evaluation.speed import BASELINE, ClockedProposer, DraftTime, Speed, compare, draft_time, measure
from deepspec.evaluation.statistics import Interval, bootstrap_difference, resample
from deepspec.inference.accelerate import accelerate
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer, PlainProposer, PromptLookupProposer
from deepspec.inference.sampling import SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from deepspec.config.schema import EvaluateConfig
    from deepspec.drafters.base import Drafter
    from deepspec.targets.target import Target

LOOKUP, SPECULATIVE, CONFIDENT = "prompt lookup", "speculative", "speculative, confident"


@dataclass(frozen=True)
class Answer:
    """One prompt and what two decoders made of it, as text."""

    prompt: str
    plain: str
    speculative: str


@dataclass(frozen=True)
class Scores:
    """Everything that was measured."""

    gamma: int
    temperature: float
    max_new_tokens: int
    acceptance: dict[str, Acceptance]
    lookup: dict[str, Acceptance]
    """Prompt lookup on the same texts, where they are greedy and were decoded plainly."""
    gain: Interval | None
    """Accepted length of the drafter minus that of prompt lookup, paired by prompt."""
    expected_length: float
    """Expected accepted length when sampling at temperature 1 along the decoded texts."""
    lossless: LosslessReport | None
    speed: list[Speed]
    draft: DraftTime | None
    """None where nothing was timed, or where no whole block was."""
    timing_threads: int
    timing_new_tokens: int
    device: str
    """cpu, or the name of the GPU."""
    precision: str
    """Of the target."""
    answer: Answer
    prompts: list[Counted]
    """The drafter's rounds, prompt by prompt."""
    settings: EvaluateConfig
    """What was asked for."""


def score(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], config: EvaluateConfig, stop_ids: Collection[int]
) -> Scores:
    """Decode ``prompts`` in every way that ``config`` asks for.

    Raises:
        ConfigError: there is no prompt, or ``evaluate.gamma`` is more than the drafter was trained for.
        UserError: ``evaluate.confidence_threshold`` is set, but the drafter has no confidence head.
    """
    if not prompts:
        raise ConfigError("data.test holds no prompt that could be scored")
    trained = drafter.conventions.gamma
    gamma = config.gamma or trained
    if gamma > trained:
        raise ConfigError(f"evaluate.gamma={gamma} is more than the {trained} tokens that the drafter was trained for")
    accelerate(target, drafter)
    evaluation = _Evaluation(target, drafter, config, stop_ids, gamma)
    evaluation.time(prompts)
    speculative = evaluation.decode(SPECULATIVE, prompts)
    greedy = config.temperature == 0.0
    plain = evaluation.decode(BASELINE, prompts if greedy and config.check_lossless else prompts[:1])
    whole = len(plain) == len(prompts) and greedy
    exact = target.head.weight.dtype == torch.float32  # in 16 bits texts part wherever two logits are close
    lookup = evaluation.replay(plain) if whole else []
    return Scores(
        gamma=gamma,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        acceptance=by_domain(speculative, config.bootstrap, config.seed),
        lookup=by_domain(lookup, config.bootstrap, config.seed) if lookup else {},
        gain=_gain(speculative, lookup, config) if lookup else None,
        expected_length=estimate(target, drafter, speculative, gamma=gamma),
        lossless=compare_greedy(target, plain, speculative) if whole and exact else None,
        speed=evaluation.speed(),
        draft=evaluation.draft_time(),
        timing_threads=config.threads,
        timing_new_tokens=config.timing_new_tokens,
        device=_device_name(target.device),
        precision=str(target.head.weight.dtype).removeprefix("torch."),
        answer=evaluation.answer(plain[0], speculative[0]),
        prompts=count_each(speculative),
        settings=config,
    )


class _Evaluation:
    """The decoders of one evaluation."""

    def __init__(
        self, target: Target, drafter: Drafter, config: EvaluateConfig, stop_ids: Collection[int], gamma: int
    ) -> None:
        self._target, self._config, self._stop_ids, self._gamma = target, config, stop_ids, gamma
        self._timed: dict[str, list[Decoded]] = {}
        self._drafts: list[list[float]] = []
        thresholds = {SPECULATIVE: None, CONFIDENT: config.confidence_threshold}
        self._decoders = {
            BASELINE: SpeculativeDecoder(target, PlainProposer()),
            LOOKUP: SpeculativeDecoder(target, self.lookup()),
        }
        for name, threshold in thresholds.items():
            if name == SPECULATIVE or threshold is not None:
                proposer = DrafterProposer(drafter, threshold)
                proposer.gamma = gamma
                self._decoders[name] = SpeculativeDecoder(target, proposer)

    def lookup(self) -> PromptLookupProposer:
        return PromptLookupProposer(self._target.info.vocab_size, self._gamma)

    def decode(self, name: str, prompts: Sequence[Prompt]) -> list[Decoded]:
        """Decode ``prompts``; greedy texts of the length wanted that were timed need not be decoded again."""
        timed = {item.prompt.id: item for item in self._timed.get(name, ())}
        same = self._config.temperature == 0.0 and self._config.timing_new_tokens == self._config.max_new_tokens
        if same and all(prompt.id in timed for prompt in prompts):
            return [timed[prompt.id] for prompt in prompts]
        settings = SamplerSettings(self._config.temperature, self._config.seed)
        return decode_prompts(
            self._decoders[name],
            prompts,
            self._config.max_new_tokens,
            lambda index: replace(settings, seed=settings.seed + index),
            self._stop_ids,
            what=f"decode ({name})",
        )

    def replay(self, plain: Sequence[Decoded]) -> list[Decoded]:
        vocab_size, room = self._target.info.vocab_size, self._config.max_new_tokens
        return replay(plain, self.lookup(), vocab_size, room, self._stop_ids)

    def time(self, prompts: Sequence[Prompt]) -> None:
        """Let every decoder run on some of ``prompts``, one beside the other, and keep what came out."""
        chosen = spread(prompts, self._config.timing_prompts)
        if not chosen:
            return
        drafter = ClockedProposer(self._decoders[SPECULATIVE].proposer, self._target.device)
        runs = measure(
            self._decoders | {SPECULATIVE: SpeculativeDecoder(self._target, drafter)},
            chosen,
            self._config.timing_new_tokens,
            SamplerSettings(self._config.temperature, self._config.seed),
            self._stop_ids,
            threads=self._config.threads,
        )
        for name, generations in runs.items():
            self._timed[name] = [Decoded(p, g) for p, g in zip(chosen, generations, strict=True)]
        self._drafts = drafter.seconds()[1:]  # the first sequence warmed up

    def speed(self) -> list[Speed]:
        """Return how fast each decoder was."""
        if not self._timed:
            return []
        runs = {name: [item.generation for item in timed] for name, timed in self._timed.items()}
        return compare(runs, resamples=self._config.bootstrap, seed=self._config.seed)

    def draft_time(self) -> DraftTime | None:
        """Return how long the drafter took for a block."""
        return draft_time(self._drafts, resamples=self._config.bootstrap, seed=self._config.seed)

    def answer(self, plain: Decoded, speculative: Decoded) -> Answer:
        def text(tokens: list[int]) -> str:
            return str(self._target.tokenizer.decode(tokens, skip_special_tokens=True))

        return Answer(text(plain.prompt.ids), text(plain.generation.tokens), text(speculative.generation.tokens))


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return at most ``count`` prompts, evenly spaced, so that every domain is among them."""
    if len(prompts) <= count:
        return list(prompts)
    return [prompts[n * len(prompts) // count] for n in range(count)]


def _gain(speculative: Sequence[Decoded], lookup: Sequence[Decoded], config: EvaluateConfig) -> Interval:
    draws = resample(len(speculative), config.bootstrap, config.seed)
    return bootstrap_difference(committed_and_rounds(speculative), committed_and_rounds(lookup), draws)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
