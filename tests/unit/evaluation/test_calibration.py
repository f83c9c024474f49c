"""Calibration of a confidence head: scores by hand, known temperatures found again, and what a cut text says."""

from __future__ import annotations

import math

import pytest
import torch

from deepspec.errors import UserError
from deepspec.evaluation.acceptance import Prompt
from deepspec.evaluation.calibration import (
    GRID,
    ConfidenceRounds,
    calibration_error,
    fit_temperatures,
    slot_scores,
)
from deepspec.evaluation.confidence_rounds import confidence_rounds, decode_listening
from deepspec.inference.decoder import Round
from deepspec.inference.proposers import survival_chances
from deepspec.inference.sampling import SamplerSettings
from tests.unit.inference.toys import ToyDrafter, ToyTarget

STEP = GRID[1] / GRID[0]


def rounds_of(chances: list[list[float]], kept: list[list[int]], judged: list[list[int]]) -> ConfidenceRounds:
    logits = torch.tensor(chances).logit()
    return ConfidenceRounds(logits, torch.tensor(kept).bool(), torch.tensor(judged).bool())


def drawn(temperatures: list[float], count: int = 40_000) -> ConfidenceRounds:
    """Log-odds of which each is true once it is divided by its slot's temperature, and blocks drawn with them."""
    generator = torch.Generator().manual_seed(0)
    logits = 2.0 * torch.randn(count, len(temperatures), generator=generator) + 1.0
    chances = (logits / torch.tensor(temperatures)).sigmoid()
    kept = (torch.rand(chances.shape, generator=generator) < chances).long().cumprod(dim=1).bool()
    return ConfidenceRounds(logits, kept, torch.ones_like(kept))


def test_the_grid_is_41_temperatures_from_a_tenth_to_ten() -> None:
    assert len(GRID) == 41
    assert (GRID[0], GRID[20], GRID[-1]) == (0.1, 1.0, 10.0)
    assert all(math.isclose(b / a, 10 ** (1 / 20)) for a, b in zip(GRID, GRID[1:], strict=False))


def test_calibration_error_by_hand() -> None:
    """Two bins: chances 0.2 and 0.4, one of two kept: 2 x |0.3 - 0.5|; chance 0.9, kept: 0.1; over three rounds."""
    chances, kept = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([False, True, True])
    assert calibration_error(chances, kept, bins=2) == pytest.approx((0.4 + 0.1) / 3)
    assert calibration_error(torch.tensor([1.0, 0.0]), torch.tensor([True, False])) == 0.0
    assert math.isnan(calibration_error(torch.empty(0), torch.empty(0).bool()))


def test_scores_by_hand() -> None:
    """The second slot's chances are products: 0.8 x 0.5, 0.6 x 0.5 and, of a round that did not judge it, nothing."""
    rounds = rounds_of(
        [[0.8, 0.5], [0.6, 0.5], [0.4, 0.9]], kept=[[1, 1], [1, 0], [0, 0]], judged=[[1, 1], [1, 1], [1, 0]]
    )
    first, second = slot_scores(rounds)
    assert (first.rounds, first.kept, second.rounds, second.kept) == (3, 2, 2, 1)
    assert first.brier == pytest.approx((0.2**2 + 0.4**2 + 0.4**2) / 3)
    assert second.brier == pytest.approx((0.6**2 + 0.3**2) / 2)
    assert first.ece == pytest.approx((0.2 + 0.4 + 0.4) / 3)
    assert (first.auc, second.auc) == (1.0, 1.0)


def test_ties_count_one_half_and_one_kind_of_round_has_no_auc() -> None:
    even = rounds_of([[0.5], [0.5], [0.9]], kept=[[1], [0], [0]], judged=[[1], [1], [1]])
    assert slot_scores(even)[0].auc == pytest.approx(0.25)
    alike = rounds_of([[0.5], [0.7]], kept=[[1], [1]], judged=[[1], [1]])
    assert math.isnan(slot_scores(alike)[0].auc)
    unseen = slot_scores(rounds_of([[0.5]], kept=[[0]], judged=[[0]]))[0]
    assert unseen.rounds == 0
    assert math.isnan(unseen.ece) and math.isnan(unseen.brier)


def test_temperatures_divide_the_log_odds_slot_by_slot() -> None:
    found = survival_chances(torch.tensor([[2.0, -1.0, 3.0]]), [2.0, 0.5, 1.0, 9.0])
    one, two, three = (1 / (1 + math.exp(-x)) for x in (1.0, -2.0, 3.0))
    torch.testing.assert_close(found, torch.tensor([[one, one * two, one * two * three]]))


@pytest.mark.parametrize("true", [[1.0, 1.0, 1.0], [2.0, 0.5, 1.0], [0.4, 3.0, 0.7, 1.5]])
def test_true_temperatures_are_found_again(true: list[float]) -> None:
    rounds = drawn(true)
    found = fit_temperatures(rounds)
    assert all(STEP**-2 < t / want < STEP**2 for t, want in zip(found, true, strict=True)), found
    assert all(slot.ece < 0.012 for slot in slot_scores(rounds, found))
    before = slot_scores(rounds)
    if true != [1.0, 1.0, 1.0]:
        assert max(slot.ece for slot in before) > 0.03


def test_a_slot_is_fitted_on_top_of_those_before_it() -> None:
    """The first slot's odds are far too sure. Fitted alone the second would have to make up for it."""
    rounds = drawn([4.0, 1.0])
    assert fit_temperatures(rounds)[1] == pytest.approx(1.0, rel=0.3)


def test_slots_that_nobody_judged_count_nowhere() -> None:
    """Half of the rounds are cut in front of the second slot: as refusals they would spoil its temperature."""
    whole = drawn([1.0, 2.0])
    judged = torch.ones_like(whole.kept)
    judged[::2, 1] = False
    kept = whole.kept & judged
    found = fit_temperatures(ConfidenceRounds(whole.logits, kept, judged))
    assert STEP**-2 < found[1] / 2.0 < STEP**2
    spoilt = fit_temperatures(ConfidenceRounds(whole.logits, kept, torch.ones_like(judged)))
    assert not STEP**-2 < spoilt[1] / 2.0 < STEP**2


def test_few_rounds_keep_a_temperature_of_one() -> None:
    few = drawn([3.0, 3.0], count=29)
    assert fit_temperatures(few) == (1.0, 1.0)
    assert fit_temperatures(few, min_rounds=29) != (1.0, 1.0)


@pytest.mark.parametrize(
    ("item", "kept", "judged"),
    [
        (Round(4, 1, 2, censored=False), "x...", "xxxx"),  # refused at the second slot: no longer prefix was kept
        (Round(4, 4, 5, censored=False), "xxxx", "xxxx"),
        (Round(4, 2, 2, censored=True), "xx..", "xx.."),  # the second draft ended the text
        (Round(2, 2, 3, censored=True), "xx..", "xx.."),  # there was no room for more
        (Round(2, 0, 1, censored=False), "....", "xx.."),
    ],
)
def test_what_a_round_shows(item: Round, kept: str, judged: str) -> None:
    found = confidence_rounds([(item, [0.5] * item.drafted)], gamma=4)
    assert found.kept[0].tolist() == [c == "x" for c in kept]
    assert found.judged[0].tolist() == [c == "x" for c in judged]
    assert found.logits[0].tolist() == [0.5] * item.drafted + [0.0] * (4 - item.drafted)


def test_rounds_are_listened_to_as_they_are_decoded() -> None:
    torch.manual_seed(0)
    target, odds = ToyTarget(torch.randn(8, 8)), torch.linspace(0.1, 0.9, 8)
    drafter = ToyDrafter(torch.randn(8, 8), 3, confidence=odds)
    prompts = [Prompt(str(n), "toy", [n]) for n in range(4)]
    decoded, rounds = decode_listening(
        target,
        drafter,
        prompts,
        9,
        lambda index: SamplerSettings(1.0, index),
        stop_ids={7},  # type: ignore[arg-type]
    )
    said = [r for item in decoded for r in item.generation.rounds if r.drafted]
    assert len(rounds.logits) == len(said) > 4
    assert rounds.kept.sum(dim=1).tolist() == [r.accepted for r in said]
    first = decoded[0].generation
    assert rounds.logits[0, 0].item() == pytest.approx(odds[first.tokens[0]].logit().item())


def test_a_drafter_without_a_confidence_head_is_refused() -> None:
    drafter = ToyDrafter(torch.zeros(8, 8))
    with pytest.raises(UserError, match=r"export\.calibration_prompts=0"):
        decode_listening(
            ToyTarget(torch.zeros(8, 8)),
            drafter,
            [Prompt("a", "", [0])],
            5,
            lambda _: SamplerSettings(),
            (),  # type: ignore[arg-type]
        )
