from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from deepspec.config.schema import GenerateConfig
from deepspec.data import generate
from deepspec.data.generate import Answer, answer_prompts, choose_tokens
from deepspec.errors import DataError
from deepspec.targets.target import Target
from tests.helpers import tiny_target

STOPS = frozenset(range(10, 20))


def prompts(count: int, shared: int = 0) -> list[tuple[str, list[int]]]:
    """Prompts of 1 to 13 tokens behind ``shared`` common ones."""
    draw = torch.Generator().manual_seed(3)
    lengths = [1 + (5 * i) % 13 for i in range(count)]
    front = list(range(30, 30 + shared))
    return [(f"p{i}", front + torch.randint(4, 97, (n,), generator=draw).tolist()) for i, n in enumerate(lengths)]


def settings(batch: int, temperature: float = 0.0, new: int = 12, seed: int = 0) -> GenerateConfig:
    return GenerateConfig(max_new_tokens=new, temperature=temperature, batch_size=batch, seed=seed)


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return tiny_target(layers=2)


def one_by_one(target: Target, ids: list[int], new: int) -> tuple[tuple[int, ...], str]:
    """Greedy decoding without any cache."""
    tokens: list[int] = []
    while len(tokens) < new:
        tokens.append(int(target.model(torch.tensor([ids + tokens])).logits[0, -1].argmax()))
        if tokens[-1] in STOPS:
            return tuple(tokens[:-1]), "stop"
    return tuple(tokens), "length"


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gemma4_text"])
def test_greedy_answers_equal_plain_decoding(family: str) -> None:
    target = tiny_target(family, layers=2)
    asked = prompts(6, shared=2)
    answers = list(answer_prompts(target, asked, settings(batch=2, new=8), STOPS))
    assert sorted(a.id for a in answers) == sorted(name for name, _ in asked)
    for answer in answers:
        assert (answer.tokens, answer.finish_reason) == one_by_one(target, dict(asked)[answer.id], 8)


def test_both_ends_occur_and_the_stop_token_is_not_part_of_the_answer(target: Target) -> None:
    answers = list(answer_prompts(target, prompts(24), settings(batch=5), STOPS))
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    assert all(len(a.tokens) == 12 for a in answers if a.finish_reason == "length")
    assert not any(set(a.tokens) & STOPS for a in answers)


def test_cut_answer_gets_no_end_of_turn(target: Target) -> None:
    [answer] = answer_prompts(target, prompts(1), settings(batch=1, new=3), frozenset())
    assert (len(answer.tokens), answer.finish_reason) == (3, "length")


def by_id(answers: list[Answer]) -> dict[str, Answer]:
    return {answer.id: answer for answer in answers}


def test_an_answer_that_repeats_itself_is_cut(target: Target) -> None:
    asked = prompts(4)
    whole = {a.id: a.tokens for a in answer_prompts(target, asked, settings(batch=4, new=120), ())}
    cut = {a.id: a for a in answer_prompts(target, asked, replace(settings(batch=4, new=120), max_repeats=3), ())}
    for name, answer in cut.items():
        phrases = Counter(answer.tokens[i : i + 8] for i in range(len(answer.tokens) - 7))
        assert answer.finish_reason == "length"
        assert answer.tokens == whole[name][: len(answer.tokens)]
        assert max(phrases.values()) == 3 or len(answer.tokens) == 120
    assert any(len(answer.tokens) < 120 for answer in cut.values())


def test_sampled_answers_depend_on_seed_and_id_only(target: Target) -> None:
    asked = prompts(10, shared=1)
    wide = by_id(list(answer_prompts(target, asked, settings(10, 1.0), STOPS)))
    narrow = by_id(list(answer_prompts(target, asked[::-1], settings(3, 1.0), STOPS)))
    part = by_id(list(answer_prompts(target, asked[4:6], settings(2, 1.0), STOPS)))
    assert wide == narrow
    assert part == {name: wide[name] for name in part}
    assert wide != by_id(list(answer_prompts(target, asked, settings(10, 1.0, seed=1), STOPS)))


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, -float("inf"), 1.0, -0.5, 0.3])
    generator = torch.Generator().manual_seed(7)
    drawn = choose_tokens(logits.expand(20_000, 8), [generator] * 20_000, 0.7)
    expected = (logits / 0.7).softmax(-1) * 20_000
    counts = torch.tensor(drawn).bincount(minlength=8)
    assert counts[4] == 0
    possible = expected > 0
    chi = ((counts - expected)[possible].square() / expected[possible]).sum()
    assert chi < 24.3  # the 0.1 % point of chi-square with 6 degrees of freedom is 22.5, of 7 is 24.3


def test_cache_moves_left_in_long_runs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(10)
    expected = by_id(list(answer_prompts(target, asked, settings(batch=10), STOPS)))
    monkeypatch.setattr(generate, "SHIFT_COLUMNS", 2)
    assert by_id(list(answer_prompts(target, asked, settings(batch=2), STOPS))) == expected


def test_no_prompts_and_empty_prompts(target: Target) -> None:
    assert list(answer_prompts(target, [], settings(4), STOPS)) == []
    with pytest.raises(DataError, match="'b' has no tokens"):
        list(answer_prompts(target, [("a", [5]), ("b", [])], settings(4), STOPS))
