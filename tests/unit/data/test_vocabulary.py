"""Which tokens a reduced draft vocabulary holds."""

from __future__ import annotations

import pytest
import torch

from deepspec.data.samples import PrepareReport, SampleSet
from deepspec.data.vocabulary import choose_tokens
from deepspec.errors import ConfigError


def samples(supervised: list[int], prompt: tuple[int, ...] = ()) -> SampleSet:
    ids = torch.tensor([*prompt, *supervised], dtype=torch.int32)
    mask = torch.tensor([0] * len(prompt) + [1] * len(supervised), dtype=torch.uint8)
    return SampleSet(ids, mask, torch.tensor([0, len(ids)]), ["a"], [""], PrepareReport())


def test_the_most_frequent_supervised_tokens_in_rising_order() -> None:
    chosen = choose_tokens(samples([7, 7, 7, 3, 3, 5], prompt=(1, 1, 1, 1)), 2, 10)
    assert chosen.ids.tolist() == [3, 7]
    assert chosen.covered == pytest.approx(5 / 6)
    assert chosen.line(10) == "draft vocabulary: 2 of 10 tokens, 83.33% of the supervised training tokens"


def test_of_equally_frequent_tokens_the_lower_ids_are_taken() -> None:
    assert choose_tokens(samples([9, 4, 8, 6]), 3, 10).ids.tolist() == [4, 6, 8]


def test_tokens_of_prompts_come_before_those_that_are_nowhere() -> None:
    assert choose_tokens(samples([7, 7], prompt=(9, 8, 8)), 2, 10).ids.tolist() == [7, 8]


def test_the_end_of_turn_tokens_are_always_there() -> None:
    chosen = choose_tokens(samples([7, 7, 3, 3, 5]), 3, 10, always=(9, 2, 99))
    assert chosen.ids.tolist() == [2, 3, 9]  # 3 and 7 are as frequent, 3 is lower


def test_the_rest_is_filled_with_the_lowest_ids() -> None:
    chosen = choose_tokens(samples([7, 1]), 5, 10, always=(4,))
    assert chosen.ids.tolist() == [0, 1, 2, 4, 7]
    assert chosen.covered == 1.0


@pytest.mark.parametrize(("size", "always"), [(11, ()), (2, (1, 2, 3))])
def test_a_size_that_cannot_be(size: int, always: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"drafter.draft_vocab_size={size} must be in .* 10"):
        choose_tokens(samples([1]), size, 10, always=always)
