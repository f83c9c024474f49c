"""Where missing answers are found, and that they are asked for once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspec.contracts import Conversation
from deepspec.data.answer_store import AnswerStore
from deepspec.data.chat import ChatRenderer
from deepspec.data.conversations import read_conversations, write_conversations
from deepspec.errors import DataError

DONE = Conversation("c/d/1", (("user", "a"), ("assistant", "b")), "c", "stop")


def ask(i: int) -> Conversation:
    return Conversation(f"c/a/{i}", (("user", f"question {i}"),), "c")


class Fake:
    """Answers, and remembers whom."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, conversations: Sequence[Conversation], out: Path) -> None:
        self.asked += [c.id for c in conversations]
        answered = [
            replace(c, messages=(*c.messages, ("assistant", f"to {c.id}")), finish_reason="length")
            for c in conversations
        ]
        write_conversations(out, answered)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_conversations(tmp_path / "train.jsonl", [ask(0), DONE, ask(1), ask(2)])
    return tmp_path / "train.jsonl"


def store_in(cache: Path, tokenizer: Any, **settings: Any) -> AnswerStore:
    return AnswerStore(cache, ChatRenderer(tokenizer), "org/model", None, settings)


def test_answers_are_merged_in_the_order_of_the_file(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    store, fake = store_in(tmp_path, tokenizer), Fake()
    with pytest.raises(DataError, match=r"train\.jsonl: 3 conversations have no answer.*deepspec\.prepare"):
        store.file(file)
    answered = store.complete(file, fake)
    conversations = list(read_conversations(answered))
    assert [c.id for c in conversations] == ["c/a/0", "c/d/1", "c/a/1", "c/a/2"]
    assert [c.messages[-1][1] for c in conversations] == ["to c/a/0", "b", "to c/a/1", "to c/a/2"]
    assert [c.finish_reason for c in conversations] == ["length", "stop", "length", "length"]
    assert store.file(file) == answered
    assert store.complete(file, fake) == answered
    assert fake.asked == ["c/a/0", "c/a/1", "c/a/2"]
    assert [p.name for p in answered.parent.iterdir()] == ["answered-all.jsonl"]


def test_a_file_with_all_answers_is_used_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    path, fake = tmp_path / "done.jsonl", Fake()
    write_conversations(path, [DONE])
    store = store_in(tmp_path, tokenizer)
    assert store.complete(path, fake) == store.file(path) == path
    assert fake.asked == []


def test_a_limit_answers_only_the_first(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    store, fake = store_in(tmp_path, tokenizer), Fake()
    assert len(list(read_conversations(store.complete(file, fake, limit=2)))) == 2
    assert fake.asked == ["c/a/0"]
    with pytest.raises(DataError, match="3 conversations have no answer"):
        store.file(file)


def test_other_settings_or_another_target_ask_again(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    fake = Fake()
    first = store_in(tmp_path, tokenizer, temperature=0.0, batch_size=1).complete(file, fake)
    assert store_in(tmp_path, tokenizer, temperature=0.0, batch_size=2).complete(file, fake) == first
    assert store_in(tmp_path, tokenizer, temperature=1.0).complete(file, fake) != first
    renderer = ChatRenderer(tokenizer)
    (tmp_path / "model").mkdir()
    local = AnswerStore(tmp_path, renderer, str(tmp_path / "model"), None, {}).complete(file, fake)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"tuned")
    assert AnswerStore(tmp_path, renderer, str(tmp_path / "model"), None, {}).complete(file, fake) != local
    assert len(fake.asked) == 12
