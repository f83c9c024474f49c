"""Sampled output is distributed as the target's own, and this test would notice if it were not.

A hundred thousand independent chains are decoded side by side by the decoder's own sampler and acceptance rule, until
each has two new tokens; the 64 pairs are compared with their exact probabilities. Faults are planted by editing the
source of the rule, so that everything else stays the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from deepspec.inference import accept
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer, PromptLookupProposer, Proposer
from deepspec.inference.sampling import Sampler, SamplerSettings
from tests.unit.inference.toys import ToyDrafter, ToyTarget

VOCAB, CHAINS, GAMMA = 8, 100_000, 3
PASS, REJECT = 1e-3, 1e-9

Verify = Callable[..., tuple[Tensor, Tensor]]
Schedule = Callable[[Tensor, Tensor, Tensor], Tensor]  # (anchor, tokens, q of tokens) -> slots kept [N, K] bool


def _draft_all(anchor: Tensor, tokens: Tensor, q: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


def _by_earlier_token(anchor: Tensor, tokens: Tensor, q: Tensor) -> Tensor:
    """Stop before a slot whose *previous* token is below 3: known before the slot is drawn."""
    return torch.cat([anchor.unsqueeze(1), tokens[:, :-1]], dim=1) >= 3


def _by_its_own_token(anchor: Tensor, tokens: Tensor, q: Tensor) -> Tensor:
    """The fault: stop before a slot because of the token that was drawn there."""
    return q >= 0.2


@dataclass
class Toy:
    """Markov chains for target and drafter, and how the drafter's probabilities are reported."""

    target: Tensor  # [V, V] logits
    drafter: Tensor  # [V, V] logits
    settings: SamplerSettings = field(default_factory=lambda: SamplerSettings(1.0, 7))
    verify: Verify = accept.verify_sampled
    schedule: Schedule = _draft_all
    drawn_from: Callable[[Tensor], Tensor] = staticmethod(lambda logits: logits)
    uniforms: Callable[[Tensor], Tensor] = staticmethod(lambda u: u)
    gamma: int = GAMMA

    def pairs(self) -> Tensor:
        """Decode every chain from token 0 and return the first two new tokens [N, 2]."""
        sampler = Sampler(self.settings)
        length = torch.zeros(CHAINS, dtype=torch.long)
        first, second = torch.zeros(CHAINS, dtype=torch.long), torch.zeros(CHAINS, dtype=torch.long)
        anchor = torch.zeros(CHAINS, dtype=torch.long)
        while bool((length < 2).any()):
            tokens, accepted, following = self._round(sampler, anchor)
            committed = torch.cat([tokens, torch.zeros(CHAINS, 1, dtype=torch.long)], dim=1)
            committed.scatter_(1, accepted.unsqueeze(1), following.unsqueeze(1))
            second = torch.where(length == 1, committed[:, 0], torch.where(length == 0, committed[:, 1], second))
            first = torch.where(length == 0, committed[:, 0], first)
            length, anchor = length + accepted + 1, following
        return torch.stack([first, second], dim=1)

    def _round(self, sampler: Sampler, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, q = self._draft(sampler, anchor)
        p = sampler.probabilities(self.target[torch.cat([anchor.unsqueeze(1), tokens], dim=1)])  # [N, K+1, V]
        of_token = q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        kept = self.schedule(anchor, tokens, of_token).long().cumprod(dim=1).sum(dim=1)
        uniforms = self.uniforms(sampler.uniforms((CHAINS, self.gamma)))
        accepted, following = torch.zeros_like(anchor), torch.zeros_like(anchor)
        for size in range(self.gamma + 1):
            rows = (kept == size).nonzero().squeeze(1)
            accepted[rows], following[rows] = self.verify(
                tokens[rows, :size], q[rows, :size], p[rows, : size + 1], uniforms[rows, :size], sampler.draw
            )
        return tokens, accepted, following

    def _draft(self, sampler: Sampler, anchor: Tensor) -> tuple[Tensor, Tensor]:
        reported = sampler.probabilities(self.drafter)
        drawn = sampler.probabilities(self.drawn_from(self.drafter))
        tokens, q, last = [], [], anchor
        for _ in range(self.gamma):
            q.append(reported[last])
            last = sampler.draw(drawn[last])
            tokens.append(last)
        return torch.stack(tokens, dim=1), torch.stack(q, dim=1)

    def p_value(self) -> float:
        """Chi-square of the pairs against the target's own probabilities."""
        p = Sampler(self.settings).probabilities(self.target).double()
        exact = (p[0].unsqueeze(1) * p).flatten()
        pairs = self.pairs()
        return _p_value(torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB), exact)


def _p_value(counts: Tensor, exact: Tensor) -> float:
    if bool((counts[exact == 0] > 0).any()):
        return 0.0
    possible = exact > 0
    expected = exact[possible] / exact[possible].sum() * counts.sum()
    return float(chisquare(counts[possible].double().numpy(), expected.numpy()).pvalue)


def logits(seed: int, scale: float = 1.5) -> Tensor:
    return scale * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def planted(before: str, after: str) -> Verify:
    """Return the acceptance rule with a piece of its source replaced."""
    source = inspect.getsource(accept)
    if source.count(before) != 1:
        raise RuntimeError(f"the rule does not contain {before!r} once")
    module = ModuleType("planted")
    exec(source.replace(before, after), module.__dict__)  # noqa: S102
    return module.verify_sampled


@pytest.mark.parametrize(("temperature", "seed"), [(0.4, 0), (1.0, 1), (1.8, 2)])
def test_sampled_output_has_the_targets_distribution(temperature: float, seed: int) -> None:
    toy = Toy(logits(10 + seed), logits(20 + seed), SamplerSettings(temperature, seed))
    assert toy.p_value() > PASS


def test_top_k_and_top_p_apply_to_both_sides() -> None:
    assert Toy(logits(1), logits(2), SamplerSettings(1.0, 3, top_k=5, top_p=0.9)).p_value() > PASS


def test_a_drafter_equal_to_the_target_is_always_kept() -> None:
    toy = Toy(logits(3), logits(3))
    _, accepted, _ = toy._round(Sampler(toy.settings), torch.zeros(CHAINS, dtype=torch.long))
    assert bool((accepted == GAMMA).all())
    assert toy.p_value() > PASS


def test_schedule_by_what_was_known_before_the_draw() -> None:
    assert Toy(logits(4), logits(5), schedule=_by_earlier_token).p_value() > PASS


def test_schedule_by_the_drawn_token_is_rejected() -> None:
    assert Toy(logits(4), logits(5), schedule=_by_its_own_token).p_value() < REJECT


def _dyadic(verify: Verify = accept.verify_sampled) -> Toy:
    """Probabilities in sixteenths, zeros among the target's, so that sixteen values of u are enough."""
    p = torch.tensor([8, 4, 2, 2, 0, 0, 0, 0]) / 16
    q = torch.tensor([2, 2, 2, 2, 2, 2, 2, 2]) / 16
    rolled = torch.stack([p.roll(i) for i in range(VOCAB)])
    drafter = q.log().expand(VOCAB, VOCAB)
    return Toy(rolled.log(), drafter, verify=verify, uniforms=lambda u: (u * 16).floor() / 16)


def test_discrete_uniforms_pass_the_strict_rule() -> None:
    assert _dyadic().p_value() > PASS


def test_less_or_equal_is_rejected() -> None:
    assert _dyadic(planted("uniforms * q < p", "uniforms * q <= p")).p_value() < REJECT


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(p - q).clamp(min=0.0)", "(p - q)"),
        ("(p - q).clamp(min=0.0)", "(p - q).abs()"),
        ("(p - q).clamp(min=0.0)", "p"),
        (".cumprod(dim=-1)", ""),
    ],
)
def test_planted_faults_are_rejected(before: str, after: str) -> None:
    assert Toy(logits(6), logits(7), verify=planted(before, after)).p_value() < REJECT


def test_bonus_token_from_a_residual_is_rejected() -> None:
    assert Toy(logits(6), logits(7), gamma=1).p_value() > PASS
    assert Toy(logits(6), logits(7), verify=planted(".masked_fill(whole, 0.0)", ""), gamma=1).p_value() < REJECT


def _offset(seed: int) -> Tensor:
    """Logits as large models have them: bf16 keeps only eighths of them."""
    return logits(seed) + 30.0


def test_drafted_in_bf16_judged_in_fp32_is_rejected() -> None:
    faulty = Toy(_offset(8), _offset(9), drawn_from=lambda x: x.bfloat16())
    assert faulty.p_value() < REJECT


def test_bf16_logits_judged_by_what_was_drawn_from_pass() -> None:
    assert Toy(_offset(8), _offset(9).bfloat16()).p_value() > PASS


def test_p_equal_to_q_up_to_rounding_leaves_a_proper_distribution() -> None:
    p = torch.softmax(logits(11), dim=-1)[:1]
    tokens = p.argmax(-1, keepdim=True)
    refused = torch.ones(1, 1)  # u = 1 cannot be drawn; it forces the refusal
    following = accept.verify_sampled(tokens, p.unsqueeze(1), p.expand(1, 2, VOCAB), refused, lambda d: d.sum(-1))[1]
    torch.testing.assert_close(following, torch.ones(1))


def test_greedy_is_the_limit_of_the_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(SamplerSettings())
    tokens = torch.randint(2, (200, 4), generator=generator)
    choices = torch.randint(2, (200, 5), generator=generator)
    one_hot = torch.nn.functional.one_hot
    accepted, following = accept.verify_sampled(
        tokens, one_hot(tokens, 2).float(), one_hot(choices, 2).float(), sampler.uniforms((200, 4)), sampler.draw
    )
    greedy = [accept.verify_greedy(t, c) for t, c in zip(tokens.tolist(), choices.tolist(), strict=True)]
    assert list(zip(accepted.tolist(), following.tolist(), strict=True)) == greedy


def _transitions(tokens: list[int]) -> Tensor:
    text = torch.tensor([0, *tokens])
    return torch.bincount(text[:-1] * VOCAB + text[1:], minlength=VOCAB * VOCAB).view(VOCAB, VOCAB)


@pytest.mark.parametrize("kind", ["drafter", "confidence", "lookup"])
@pytest.mark.parametrize("new_tokens", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_the_real_loop_has_the_targets_distribution(kind: str, new_tokens: int) -> None:
    target = ToyTarget(logits(12, 1.0))
    drafter = ToyDrafter(logits(13, 1.0), GAMMA, confidence=torch.linspace(0.1, 0.9, VOCAB))
    proposers: dict[str, Proposer] = {
        "drafter": DrafterProposer(drafter),  # type: ignore[arg-type]
        "confidence": DrafterProposer(drafter, confidence_threshold=0.4),  # type: ignore[arg-type]
        "lookup": PromptLookupProposer(VOCAB, GAMMA),
    }
    result = SpeculativeDecoder(target, proposers[kind]).generate([0], new_tokens, SamplerSettings(1.0, 5))
    if kind == "confidence":
        assert {r.drafted for r in result.rounds} == set(range(GAMMA + 1))
    counts, p = _transitions(result.tokens), torch.softmax(target.logits.double(), dim=-1)
    for row in range(VOCAB):
        assert _p_value(counts[row], p[row]) > PASS / VOCAB
