"""The per-row loss functions against values that can be worked out by hand."""

from __future__ import annotations

import math

import torch

from deepspec.losses import rows

LN3 = 1.0986122886681098


def test_uniform_against_one_hot() -> None:
    draft, target = torch.zeros(1, 4), torch.tensor([[100.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rows.l1_distance(draft, target), torch.tensor([1.5]))
    torch.testing.assert_close(rows.total_variation(draft, target), torch.tensor([0.75]))
    torch.testing.assert_close(rows.acceptance(draft, target), torch.tensor([0.25]))


def test_divergences_of_a_quarter_against_a_half() -> None:
    """q = (1/4, 3/4) and p = (1/2, 1/2), so m = (3/8, 5/8)."""
    draft, target = torch.tensor([[0.0, LN3]]), torch.zeros(1, 2)
    reverse = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    of_p = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    of_q = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    torch.testing.assert_close(rows.reverse_kl(draft, target), torch.tensor([reverse]))
    torch.testing.assert_close(rows.jensen_shannon(draft, target), torch.tensor([0.5 * (of_p + of_q)]))


def test_divergences_where_the_target_underflows() -> None:
    draft, target = torch.tensor([[0.0, 0.0]]), torch.tensor([[300.0, 0.0]])
    assert target.softmax(-1)[0, 1] == 0.0
    torch.testing.assert_close(rows.reverse_kl(draft, target), torch.tensor([150.0 - math.log(2.0)]))
    assert 0.0 < rows.jensen_shannon(draft, target) < math.log(2.0)


def test_cross_entropy_of_three_to_one() -> None:
    logits = torch.tensor([[LN3, 0.0]])
    expected = -torch.log(torch.tensor([0.25]))
    torch.testing.assert_close(rows.cross_entropy(logits, torch.tensor([1])), expected)


def test_low_precision_is_widened() -> None:
    assert rows.l1_distance(torch.zeros(1, 4).bfloat16(), torch.ones(1, 4).bfloat16()).dtype == torch.float32


def test_binary_cross_entropy_is_least_at_the_acceptance() -> None:
    acceptance = torch.tensor([0.3])
    best = rows.binary_cross_entropy(torch.logit(acceptance), acceptance)
    for chance in (0.2, 0.4):
        assert rows.binary_cross_entropy(torch.logit(torch.tensor([chance])), acceptance) > best
