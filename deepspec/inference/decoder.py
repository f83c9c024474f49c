"""The decoding loop: prefill, then rounds of propose, verify, commit.

The text has positions 0, 1, 2, ... The last committed token is the anchor of the next round: the target has not read
it yet. A round feeds the anchor and k drafted tokens to the target in one forward pass, keeps the first n drafts, and
commits n + 1 tokens: the last of them is the next anchor. The target's cache then holds every committed position but
the new anchor's, and the proposer is given the features of exactly those.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from deepspec.contracts import Committed
from deepspec.errors import UserError
from deepspec.inference.accept import verify_greedy, verify_sampled
from deepspec.inference.sampling import Sampler, SamplerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from torch import Tensor

    from deepspec.contracts import Proposal
    from deepspec.inference.proposers import Proposer


class Stepped(Protocol):
    """What a target says about the tokens of one step."""

    @property
    def logits(self) -> Tensor:
        """[n, V] fp32, of the last n tokens."""
        ...

    @property
    def hidden(self) -> Tensor:
        """[t, C*D], the outputs of the layers asked for."""
        ...

    @property
    def last_hidden(self) -> Tensor:
        """[t, D], the states after the final norm."""
        ...


class DecodingTarget(Protocol):
    """A target that reads tokens step by step."""

    @property
    def device(self) -> torch.device:
        """Where the tokens are wanted."""
        ...

    def new_cache(self, max_length: int) -> Any:
        """Return an empty cache for at most ``max_length`` positions."""
        ...

    def step(
        self, input_ids: Tensor, cache: Any, layer_ids: tuple[int, ...], *, num_logits: int | None = None
    ) -> Stepped:
        """Read ``input_ids`` [1, t] after the positions in ``cache``, which grows by t.

        The logits are those of the last ``num_logits`` tokens, or of all t.
        """
        ...

    def crop(self, cache: Any, length: int) -> None:
        """Forget all but the first ``length`` positions."""
        ...


@dataclass(frozen=True)
class Round:
    """One forward pass of the target after the prefill.

    ``censored`` says that the text ended (a stop token among the drafts, or no room left) before the round could show
    how far the target would have followed: its ``accepted`` is a lower bound, not a count that ends in a refusal.
    """

    drafted: int
    accepted: int
    committed: int
    censored: bool


@dataclass(frozen=True)
class Generation:
    """The new tokens (a stop token included), and how they came about."""

    tokens: list[int]
    rounds: list[Round]
    seconds: float
    prefill_seconds: float
    finish_reason: Literal["stop", "length"]

    @property
    def accepted_length(self) -> float:
        """Tokens committed per forward pass of the target after the prefill; nan without one."""
        committed = sum(r.committed for r in self.rounds)
        return committed / len(self.rounds) if self.rounds else float("nan")


@dataclass
class _Text:
    """The text under construction."""

    cache: Any
    sampler: Sampler
    stop_ids: frozenset[int]
    gamma: int
    room: int
    length: int = 0  # positions in the target's cache
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stopped: bool = False

    def commit(self, new: list[int]) -> int:
        """Append ``new`` up to the first stop token and return how many that were."""
        for count, token in enumerate(new, start=1):
            self.tokens.append(token)
            if token in self.stop_ids:
                self.stopped = True
                return count
        return len(new)

    @property
    def finished(self) -> bool:
        return self.stopped or len(self.tokens) >= self.room


class SpeculativeDecoder:
    """Decodes one sequence at a time with any proposer; the output is the target's own, only sooner."""

    def __init__(self, target: DecodingTarget, proposer: Proposer) -> None:
        self.target = target
        self.proposer = proposer

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        settings: SamplerSettings | None = None,
        stop_ids: Collection[int] = (),
        gamma: int | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """Continue ``prompt_ids`` by at most ``max_new_tokens`` tokens.

        Args:
            prompt_ids: at least one token.
            max_new_tokens: at least 1.
            settings: greedy by default.
            stop_ids: tokens that end the text; the one that does is the last of the result.
            gamma: drafted tokens of a round, at most the proposer's own, which is the default.
            on_tokens: called with the newly committed tokens after each round.
        """
        rounds = self.rounds(prompt_ids, max_new_tokens, settings, stop_ids, gamma)
        while True:
            try:
                new = next(rounds)
            except StopIteration as end:
                generation: Generation = end.value
                return generation
            if on_tokens is not None:
                on_tokens(new)

    def rounds(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        settings: SamplerSettings | None = None,
        stop_ids: Collection[int] = (),
        gamma: int | None = None,
    ) -> Generator[list[int], None, Generation]:
        """Check the arguments, those of ``generate``, and return a generator of the newly committed tokens.

        It yields those of the prefill and of each round, when they are wanted, and returns the whole generation, whose
        seconds are those of the clock, the reader's included. The proposer follows one text at a time: a text that
        another one interrupts cannot go on.
        """
        self._check(prompt_ids, max_new_tokens, gamma)
        gamma = self.proposer.gamma if gamma is None else gamma
        return self._rounds(prompt_ids, max_new_tokens, settings or SamplerSettings(), frozenset(stop_ids), gamma)

    @torch.inference_mode()
    def _rounds(
        self, prompt_ids: Sequence[int], room: int, settings: SamplerSettings, stop_ids: frozenset[int], gamma: int
    ) -> Generator[list[int], None, Generation]:
        start = time.perf_counter()
        text = self._prefill(prompt_ids, room, settings, stop_ids, gamma)
        prefill_seconds = time.perf_counter() - start
        told = 0
        while True:
            yield text.tokens[told:]
            told = len(text.tokens)
            if text.finished:
                break
            self._round(text)
        seconds = time.perf_counter() - start
        return Generation(text.tokens, text.rounds, seconds, prefill_seconds, "stop" if text.stopped else "length")

    def _check(self, prompt_ids: Sequence[int], max_new_tokens: int, gamma: int | None) -> None:
        if len(prompt_ids) == 0:
            raise UserError("the prompt has no token; give at least one")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}, but it must be 1 or more")
        if gamma is not None and not 0 <= gamma <= self.proposer.gamma:
            raise UserError(f"gamma is {gamma}, but this proposer drafts at most {self.proposer.gamma} tokens a round")

    def _prefill(
        self, prompt_ids: Sequence[int], room: int, settings: SamplerSettings, stop_ids: frozenset[int], gamma: int
    ) -> _Text:
        """Read the prompt and commit the first token, which comes from the target alone."""
        max_length = len(prompt_ids) + room
        cache = self.target.new_cache(max_length)
        stepped = self._step(list(prompt_ids), cache, num_logits=1)
        sampler = Sampler(settings, stepped.logits.device)
        text = _Text(cache, sampler, stop_ids, gamma, room, length=len(prompt_ids))
        text.commit([int(sampler(stepped.logits[-1])[0])])
        if not text.finished:
            self.proposer.start(max_length)
            self.proposer.extend(_committed(prompt_ids, stepped))
        return text

    def _step(self, tokens: list[int], cache: Any, num_logits: int | None = None) -> Stepped:
        ids = torch.tensor([tokens], device=self.target.device)
        return self.target.step(ids, cache, self.proposer.layer_ids, num_logits=num_logits)

    def _round(self, text: _Text) -> None:
        """Propose, verify in one forward pass of the target, commit."""
        anchor = text.tokens[-1]
        wanted = min(text.gamma, text.room - len(text.tokens) - 1)  # the target adds one token of its own
        proposal = self.proposer.propose(anchor, wanted, text.sampler) if wanted > 0 else None
        drafts: list[int] = [] if proposal is None else proposal.tokens.tolist()
        stepped = self._step([anchor, *drafts], text.cache)
        accepted, following = _verify(drafts, proposal, stepped.logits, text.sampler)
        new = [*drafts[:accepted], following]
        committed = text.commit(new)
        no_room = wanted < text.gamma and accepted == len(drafts) == wanted
        kept = min(accepted, committed)
        text.rounds.append(Round(len(drafts), kept, committed, censored=no_room or committed < len(new)))
        if text.finished:
            return
        text.length += 1 + accepted
        if accepted < len(drafts):
            self.target.crop(text.cache, text.length)
        self.proposer.extend(_committed([anchor, *drafts[:accepted]], stepped))


def _committed(tokens: Sequence[int], stepped: Stepped) -> Committed:
    """Return the first tokens of a step, which are decided, with what the target says about them."""
    count = len(tokens)
    return Committed(tokens, stepped.hidden[:count], stepped.last_hidden[:count])


def _verify(drafts: list[int], proposal: Proposal | None, logits: Tensor, sampler: Sampler) -> tuple[int, int]:
    """Judge ``drafts`` (k tokens) by the target's ``logits`` [k+1, V]; return (accepted, the token after them)."""
    if sampler.settings.greedy:
        return verify_greedy(drafts, logits.argmax(dim=-1).tolist())
    target = sampler.probabilities(logits)
    if proposal is None or not drafts:
        return 0, int(sampler.draw(target[0]))
    accepted, following = verify_sampled(
        proposal.tokens.unsqueeze(0),
        proposal.probabilities.unsqueeze(0),
        target.unsqueeze(0),
        sampler.uniforms((1, len(drafts))),
        sampler.draw,
    )
    return int(accepted), int(following)
