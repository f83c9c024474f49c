from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepspec.config.schema import GenerateConfig
from deepspec.contracts import Conversation
from deepspec.data import answers
from deepspec.data.answers import AnswerReport, answer_file
from deepspec.data.chat import ChatRenderer
from deepspec.data.conversations import read_conversations
from deepspec.data.generate import Answer, answer_prompts
from deepspec.errors import DataError
from deepspec.targets.target import Target
from tests.helpers import tiny_target

SETTINGS = GenerateConfig(max_new_tokens=6, batch_size=3)


class Stopped(Exception):  # noqa: N818
    """The process dies here."""


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return tiny_target(layers=2)


@pytest.fixture(scope="module")
def renderer(target: Target) -> ChatRenderer:
    return ChatRenderer(target.tokenizer, eos_token_ids=range(40, 50))


def questions(count: int) -> list[Conversation]:
    return [Conversation(f"q{i}", (("user", "abc " * (1 + i % 4)),), source="chat") for i in range(count)]


def dies_after(count: int, asked: list[str]) -> Any:
    """Answer ``count`` prompts, the first one last, then die."""

    def run(target: Target, prompts: Sequence[Any], config: GenerateConfig, stops: Any) -> Iterator[Answer]:
        asked.extend(name for name, _ in prompts)
        finished = sorted(answer_prompts(target, prompts, config, stops), key=lambda a: a.id, reverse=True)
        yield from finished[:count]
        if count < len(finished):
            raise Stopped

    return run


def test_every_id_once_in_order_after_two_deaths(
    target: Target, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole.jsonl"
    answer_file(target, renderer, questions(8), SETTINGS, whole)
    out, asked = tmp_path / "out.jsonl", list[str]()
    partial = tmp_path / "out.jsonl.partial"
    for count in (3, 2):
        monkeypatch.setattr(answers, "answer_prompts", dies_after(count, asked))
        with pytest.raises(Stopped):
            answer_file(target, renderer, questions(8), SETTINGS, out)
        assert not out.exists()
        with partial.open("a") as file:
            file.write('{"id": "q0", "messages": [{"role": "us')  # a line torn by the kill
    monkeypatch.setattr(answers, "answer_prompts", dies_after(99, asked))
    report = answer_file(target, renderer, questions(8), SETTINGS, out)
    assert out.read_text() == whole.read_text()
    assert [c.id for c in read_conversations(out)] == [f"q{i}" for i in range(8)]
    assert len(asked) == 8 + 5 + 3
    assert report.answered == 8
    assert not partial.exists()


def test_reason_for_stopping_is_stored(target: Target, renderer: ChatRenderer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    report = answer_file(target, renderer, questions(12), SETTINGS, out)
    read = list(read_conversations(out))
    assert report.cut_by_length == sum(c.finish_reason == "length" for c in read)
    assert {c.finish_reason for c in read} == {"stop", "length"}
    for conversation in read:
        assert [role for role, _ in conversation.messages] == ["user", "assistant"]
        assert conversation.source == "chat"
        assert "<|im_end|>" not in conversation.messages[-1][1]


def test_other_settings_do_not_mix(
    target: Target, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(answers, "answer_prompts", dies_after(2, []))
    with pytest.raises(Stopped):
        answer_file(target, renderer, questions(4), SETTINGS, out)
    with pytest.raises(DataError, match="another max_new_tokens; delete it"):
        answer_file(target, renderer, questions(4), replace(SETTINGS, max_new_tokens=9), out)
    monkeypatch.setattr(answers, "answer_prompts", answer_prompts)
    answer_file(target, renderer, questions(4), replace(SETTINGS, batch_size=2), out)
    assert len(out.read_text().splitlines()) == 4


def test_text_that_gives_other_tokens_is_counted(
    target: Target, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Answer("q0", (5, 3, 0, 93), "stop")  # 94 to 96 have no text; specials written in text stay themselves
    conversation, same = answers._answered(questions(1)[0], said, target.tokenizer)
    assert same
    assert conversation.messages[-1] == ("assistant", " <|mask|><|pad|>&")
    finished = [said, Answer("q1", (5, 95), "stop"), Answer("q2", (5, 96), "length"), Answer("q3", (5,), "stop")]

    def dies(*_: Any) -> Iterator[Answer]:
        yield from finished[:2]
        raise Stopped

    monkeypatch.setattr(answers, "answer_prompts", dies)
    with pytest.raises(Stopped):
        answer_file(target, renderer, questions(4), SETTINGS, tmp_path / "out.jsonl")
    monkeypatch.setattr(answers, "answer_prompts", lambda *_: iter(finished[2:]))
    report = answer_file(target, renderer, questions(4), SETTINGS, tmp_path / "out.jsonl")
    assert report == AnswerReport(answered=4, cut_by_length=1, retokenised_differently=2)
    assert report.line().startswith("4 prompts answered, 1 of the answers cut")
    assert "text of 2 gives other tokens" in report.line()


def test_a_torn_line_is_cut_off_without_writing_the_others_again(
    target: Target, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    monkeypatch.setattr(answers, "answer_prompts", dies_after(2, []))
    with pytest.raises(Stopped):
        answer_file(target, renderer, questions(4), SETTINGS, out)
    whole = partial.read_bytes()
    partial.write_bytes(whole + b"\x00" * 9)
    monkeypatch.setattr(answers, "answer_prompts", dies_after(0, []))
    for name in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, name, lambda *_, **__: pytest.fail("a kill in here would lose every answer"))
    with pytest.raises(Stopped):
        answer_file(target, renderer, questions(4), SETTINGS, out)
    assert partial.read_bytes() == whole


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: [b"\0\0\0", *lines[1:]], "partial:1: no settings"),
        (lambda lines: [b"[1]", *lines[1:]], "partial:1: no settings"),
        (lambda lines: [lines[0], b'{"id": ', *lines[2:]], "partial:2: not valid JSON"),
        (lambda lines: [lines[0], b"\xff\xfe", *lines[2:]], "not UTF-8"),
    ],
)
def test_a_damaged_unfinished_file_is_named(
    target: Target,
    renderer: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[list[bytes]], list[bytes]],
    says: str,
) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    monkeypatch.setattr(answers, "answer_prompts", dies_after(2, []))
    with pytest.raises(Stopped):
        answer_file(target, renderer, questions(4), SETTINGS, out)
    partial.write_bytes(b"\n".join(damage(partial.read_bytes().split(b"\n"))))
    with pytest.raises(DataError, match=says):
        answer_file(target, renderer, questions(4), SETTINGS, out)


def test_an_answer_is_never_cut_inside_a_character() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    whole = tuple(tokenizer("ok \N{GRINNING FACE}")["input_ids"])
    for cut in (1, 2, 3):
        conversation, same = answers._answered(questions(1)[0], Answer("q0", whole[:-cut], "length"), tokenizer)
        assert same
        assert conversation.messages[-1] == ("assistant", "ok ")
    conversation, same = answers._answered(questions(1)[0], Answer("q0", whole, "length"), tokenizer)
    assert same
    assert conversation.messages[-1] == ("assistant", "ok \N{GRINNING FACE}")
