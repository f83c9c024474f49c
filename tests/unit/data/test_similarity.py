"""Nearness of test and training prompts, repetition, families."""

from __future__ import annotations

import pytest

from deepspec.data.similarity import compare_prompts, repeated_ngram_share
from deepspec.data.splits import check_families, family_of, shared_families
from deepspec.errors import DataError

LONG = "please explain how a suspension bridge carries its load and why the cables are curved"


def test_near_copies_are_found_and_strangers_are_not() -> None:
    pytest.importorskip("datasketch")
    train = {"t1": LONG, "t2": "write a haiku about rain"}
    near = {"a": LONG.replace("suspension", "stone"), "b": "sum the numbers from one to nine"}
    report = compare_prompts(near, train)
    assert [p.test_id for p in report.above] == ["a"]
    assert report.highest is not None
    assert report.highest.train_id == "t1"
    exact = 13 / 15  # one of fourteen distinct words replaced: 13 shared of 15
    assert report.highest.similarity == pytest.approx(exact, abs=0.1)
    assert "1 test prompts above 0.7" in report.line()
    far = compare_prompts({"b": near["b"]}, train)
    assert far.above == ()
    assert far.highest is not None
    assert far.highest.similarity < 0.4


def test_equal_texts_and_nothing_to_compare() -> None:
    pytest.importorskip("datasketch")
    same = compare_prompts({"a": "Hi There"}, {"b": "hi there"}, shingle=3)
    assert same.highest is not None
    assert same.highest.similarity == 1.0
    assert compare_prompts({}, {"b": "x"}).highest is None
    assert "nothing" in compare_prompts({}, {}).line()


def test_share_of_tokens_in_repeated_ngrams() -> None:
    assert repeated_ngram_share([list(range(20))]) == 0.0
    assert repeated_ngram_share([list(range(8)), list(range(8))]) == 1.0
    assert repeated_ngram_share([[1] * 9]) == 1.0
    assert repeated_ngram_share([[1] * 8]) == 0.0
    # 8 of 12 tokens of the second list and 8 of 8 of the first: 16 of 20
    assert repeated_ngram_share([list(range(8)), [90, 91, *range(8), 92, 93]]) == pytest.approx(16 / 20)
    assert repeated_ngram_share([[1, 2, 3, 1, 2, 4]], n=2) == pytest.approx(4 / 6)
    assert repeated_ngram_share([]) == 0.0


def test_families_stay_in_one_split() -> None:
    assert family_of("code/loops/0001") == "code/loops"
    assert family_of("code-7") == "code-7"
    splits = {"train": ["code/loops/1", "code/loops/2", "chat/a/1"], "test": ["chat/b/1"]}
    check_families(splits)
    splits["test"].append("code/loops/3")
    assert shared_families(splits) == {"code/loops": ["test", "train"]}
    with pytest.raises(DataError, match=r"code/loops in test and train"):
        check_families(splits)
