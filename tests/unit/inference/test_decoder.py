"""The loop's books: what is committed, what is censored, what the cache and the proposer are told."""

from __future__ import annotations

from collections.abc import Collection
from unittest.mock import Mock

import pytest
import torch

from deepspec.contracts import Committed, Proposal
from deepspec.errors import UserError
from deepspec.inference.decoder import Round, SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer, PlainProposer, PromptLookupProposer
from deepspec.inference.sampling import Sampler, SamplerSettings
from tests.unit.inference.toys import ScriptDrafter, ToyDrafter, ToyTarget, counting_target

VOCAB = 40


def scripted(wrong: Collection[int] = (), gamma: int = 5) -> tuple[SpeculativeDecoder, ToyTarget, ScriptDrafter]:
    """A target that holds token p at position p after the prompt [0], and a drafter that errs at ``wrong``."""
    drafter = ScriptDrafter({p: p if p not in wrong else VOCAB - 1 for p in range(VOCAB)}, VOCAB, gamma)
    target = counting_target(VOCAB)
    return SpeculativeDecoder(target, DrafterProposer(drafter)), target, drafter  # type: ignore[arg-type]


def test_plain_decoding_takes_one_token_a_round() -> None:
    target = counting_target(VOCAB)
    result = SpeculativeDecoder(target, PlainProposer()).generate([0], 4)
    assert result.tokens == [1, 2, 3, 4]
    assert result.rounds == [Round(0, 0, 1, censored=False)] * 3
    assert target.steps == [1, 1, 1, 1]
    assert result.accepted_length == 1.0


def test_whole_blocks_commit_the_bonus_token() -> None:
    decoder, target, _ = scripted()
    result = decoder.generate([0], 13)
    assert result.tokens == list(range(1, 14))
    assert result.rounds == [Round(5, 5, 6, censored=False)] * 2
    assert target.steps == [1, 6, 6]


def test_refusal_crops_the_cache_and_extends_the_drafter_with_committed_positions_only() -> None:
    decoder, target, drafter = scripted(wrong={4})
    result = decoder.generate([0], 20)
    assert result.tokens == list(range(1, 21))
    assert result.rounds[0] == Round(5, 2, 3, censored=False)
    committed = 1 + sum(r.committed for r in result.rounds[:-1])
    assert drafter.positions == list(range(committed))  # every position once, in order, without the anchor's


def test_no_room_shortens_the_draft_and_censors_the_round() -> None:
    decoder, target, _ = scripted()
    result = decoder.generate([0], 4)
    assert result.tokens == [1, 2, 3, 4]
    assert result.finish_reason == "length"
    assert result.rounds == [Round(2, 2, 3, censored=True)]
    assert target.steps == [1, 3]


def test_refusal_in_a_shortened_round_is_a_refusal() -> None:
    decoder, _, _ = scripted(wrong={3})
    result = decoder.generate([0], 4)
    assert result.rounds == [Round(2, 1, 2, censored=False), Round(0, 0, 1, censored=True)]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (4, Round(5, 3, 3, censored=True)),  # inside the block
        (6, Round(5, 5, 5, censored=True)),  # the last drafted token: only the bonus is lost
        (7, Round(5, 5, 6, censored=False)),  # the bonus itself
    ],
)
def test_stop_token_inside_a_block_ends_the_text(stop: int, expected: Round) -> None:
    decoder, _, _ = scripted()
    result = decoder.generate([0], 30, stop_ids=[stop])
    assert result.tokens == list(range(1, stop + 1))
    assert result.finish_reason == "stop"
    assert result.rounds == [expected]


def test_stop_token_after_a_refusal_is_not_censored() -> None:
    decoder, _, _ = scripted(wrong={4})
    result = decoder.generate([0], 30, stop_ids=[4])
    assert result.tokens == [1, 2, 3, 4]
    assert result.rounds == [Round(5, 2, 3, censored=False)]


def test_stop_token_from_the_prefill_needs_no_round() -> None:
    decoder, target, drafter = scripted()
    result = decoder.generate([0], 30, stop_ids=[1])
    assert (result.tokens, result.rounds, target.steps) == ([1], [], [1])
    assert drafter.positions == []


@pytest.mark.parametrize("gamma", [0, 1, 3, 5])
def test_any_gamma_up_to_the_trained_one(gamma: int) -> None:
    decoder, target, _ = scripted()
    result = decoder.generate([0], 1 + 2 * (gamma + 1), gamma=gamma)
    assert result.tokens == list(range(1, 2 * (gamma + 1) + 2))
    assert target.steps == [1, gamma + 1, gamma + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4), "prompt"),
        (([0], 0), "max_new_tokens is 0"),
        (([0], 4, None, (), 6), "gamma is 6"),
    ],
)
def test_impossible_requests_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        scripted()[0].generate(*arguments)


def test_tokens_are_streamed_as_they_are_committed() -> None:
    pieces: list[list[int]] = []
    decoder, _, _ = scripted()
    result = decoder.generate([0], 13, on_tokens=pieces.append)
    assert pieces == [[1], [2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]]
    assert sum(pieces, []) == result.tokens


def test_prompt_lookup_repeats_the_latest_longest_match() -> None:
    lookup = PromptLookupProposer(VOCAB, gamma=4)
    sampler = _greedy()
    lookup.start(100)
    lookup.extend(said([1, 2, 3, 10, 11, 9, 2, 3, 20, 21, 22, 23, 1, 2]))
    proposal = lookup.propose(3, 4, sampler)  # 1 2 3 occurred once; 2 3 also later, but the longer match wins
    assert proposal is not None
    assert proposal.tokens.tolist() == [10, 11, 9, 2]
    assert proposal.probabilities.argmax(-1).tolist() == [10, 11, 9, 2]
    assert proposal.probabilities.sum() == 4
    lookup.extend(said([3, 7, 2]))
    latest = lookup.propose(3, 2, sampler)
    assert latest is not None
    assert latest.tokens.tolist() == [7, 2]  # 7 2 3 is new; the latest 2 3 is the one at the end
    assert lookup.propose(30, 4, sampler) is None


def test_prompt_lookup_match_at_the_very_end() -> None:
    lookup = PromptLookupProposer(VOCAB, gamma=4)
    lookup.start(100)
    lookup.extend(said([5, 5]))
    proposal = lookup.propose(5, 4, _greedy())
    assert proposal is not None
    assert proposal.tokens.tolist() == [5]


def test_prompt_lookup_speeds_up_a_periodic_text() -> None:
    table = 10.0 * torch.eye(7).roll(1, dims=1)
    result = SpeculativeDecoder(ToyTarget(table), PromptLookupProposer(7, gamma=5)).generate(
        [0, 1, 2, 3, 4, 5, 6, 0], 60
    )
    assert result.tokens == [(1 + i) % 7 for i in range(60)]
    assert result.accepted_length > 5


def test_confidence_threshold_needs_a_confidence_head() -> None:
    drafter = ToyDrafter(torch.zeros(8, 8))
    decoder = SpeculativeDecoder(ToyTarget(torch.zeros(8, 8)), DrafterProposer(drafter, 0.5))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no confidence head"):
        decoder.generate([0], 5)


@pytest.mark.parametrize(("threshold", "kept"), [(0.7, 0), (0.59, 1), (0.29, 2), (0.28, 2), (0.26, 3)])
def test_a_block_ends_where_the_product_of_confidences_falls_below_the_threshold(threshold: float, kept: int) -> None:
    """A slot counts only if all before it are kept: 0.6, 0.6 * 0.5, 0.6 * 0.5 * 0.9."""
    odds = torch.tensor([0.6, 0.5, 0.9]).logit()
    drafter = Mock(conventions=Mock(gamma=3, target_layer_ids=()), confidence_temperatures=None)
    drafter.propose.return_value = Proposal(torch.tensor([4, 5, 6]), torch.eye(8)[4:7], odds)
    proposal = DrafterProposer(drafter, threshold).propose(1, 3, _greedy())
    assert proposal is not None
    assert proposal.tokens.tolist() == [4, 5, 6][:kept]
    assert proposal.probabilities.shape == (kept, 8)


@pytest.mark.parametrize(("threshold", "kept"), [(0.58, 0), (0.54, 1), (0.35, 1), (0.2, 2)])
def test_temperatures_change_where_a_block_ends(threshold: float, kept: int) -> None:
    """Log-odds 1 and -1 over temperatures 4 and 2: sigmoid(0.25) = 0.562, times sigmoid(-0.5) = 0.378 is 0.212."""
    drafter = Mock(conventions=Mock(gamma=3, target_layer_ids=()), confidence_temperatures=(4.0, 2.0, 1.0))
    drafter.propose.return_value = Proposal(torch.tensor([4, 5]), torch.eye(8)[4:6], torch.tensor([1.0, -1.0]))
    proposal = DrafterProposer(drafter, threshold).propose(1, 2, _greedy())
    assert proposal is not None
    assert len(proposal.tokens) == kept


def test_rounds_come_when_they_are_wanted() -> None:
    torch.manual_seed(0)
    target, drafter = ToyTarget(torch.randn(8, 8)), ToyDrafter(torch.randn(8, 8))
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter))  # type: ignore[arg-type]
    whole = decoder.generate([0], 20)
    rounds = decoder.rounds([0], 20)
    steps = len(target.steps)
    assert next(rounds) == whole.tokens[:1]
    assert len(target.steps) == steps + 1, "the prefill alone"
    assert [token for new in rounds for token in new] == whole.tokens[1:]
    with pytest.raises(UserError, match="max_new_tokens"):
        decoder.rounds([0], 0)


def test_the_seed_fixes_the_output() -> None:
    torch.manual_seed(0)
    target, drafter = ToyTarget(torch.randn(8, 8)), ToyDrafter(torch.randn(8, 8))
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter))  # type: ignore[arg-type]
    runs = [decoder.generate([0], 30, SamplerSettings(1.0, seed)).tokens for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def said(tokens: list[int]) -> Committed:
    """Tokens for a proposer that reads no features."""
    return Committed(tokens, torch.zeros(len(tokens), 0), torch.zeros(len(tokens), 0))


def _greedy() -> Sampler:
    return Sampler(SamplerSettings())
