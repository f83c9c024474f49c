"""Where missing answers come from, and that each is asked for once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspec.contracts import Conversation
from deepspec.data.answers import AnswerStore, read_answers
from deepspec.data.chat import ChatRenderer
from deepspec.data.conversations import read_conversations, write_conversations
from deepspec.errors import DataError

DONE = Conversation("c/d/1", (("user", "a"), ("assistant", "b")), "c", "stop")


def ask(i: int) -> Conversation:
    return Conversation(f"c/a/{i}", (("user", f"question {i}"),), "c")


class Fake:
    """Answers out of order, keeps count, and may be killed after some."""

    def __init__(self, die_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.die_after = die_after

    def __call__(self, prompts: Sequence[Conversation], store: Path) -> None:
        done = read_answers(store)
        with store.open("a", encoding="utf-8") as file:
            for prompt in reversed([p for p in prompts if p.id not in done]):
                if len(self.asked) == self.die_after:
                    file.write('{"id": "c/a/0", "cont')  # killed in the middle of a line
                    raise KeyboardInterrupt
                self.asked.append(prompt.id)
                reason = "length" if prompt.id == "c/a/2" else "stop"
                record = {"id": prompt.id, "content": f"to {prompt.messages[-1][1]}", "finish_reason": reason}
                file.write(json.dumps(record) + "\n")


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
    assert [c.messages[-1][1] for c in conversations] == ["to question 0", "b", "to question 1", "to question 2"]
    assert [c.finish_reason for c in conversations] == ["stop", "stop", "stop", "length"]
    assert store.file(file) == answered
    assert store.complete(file, fake) == answered
    assert len(fake.asked) == 3


def test_a_file_with_all_answers_is_used_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "done.jsonl"
    write_conversations(path, [DONE])
    fake = Fake()
    store = store_in(tmp_path, tokenizer)
    assert store.complete(path, fake) == store.file(path) == path
    assert fake.asked == []


def test_after_a_kill_only_what_is_missing_is_asked_again(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    store, killed, fake = store_in(tmp_path, tokenizer), Fake(die_after=2), Fake()
    with pytest.raises(KeyboardInterrupt):
        store.complete(file, killed)
    (partial,) = (tmp_path / "answers").glob("*/answers.jsonl")
    partial.write_text(partial.read_text(encoding="utf-8").rpartition("\n")[0] + "\n", encoding="utf-8")
    answered = store.complete(file, fake)
    assert (killed.asked, fake.asked) == (["c/a/2", "c/a/1"], ["c/a/0"])
    assert len(list(read_conversations(answered))) == 4


def test_a_limit_answers_only_the_first_and_is_kept_for_later(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    store, fake = store_in(tmp_path, tokenizer), Fake()
    assert len(list(read_conversations(store.complete(file, fake, limit=2)))) == 2
    assert fake.asked == ["c/a/0"]
    store.complete(file, fake)
    assert sorted(fake.asked) == ["c/a/0", "c/a/1", "c/a/2"]


def test_other_settings_or_another_target_ask_again(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    fake = Fake()
    first = store_in(tmp_path, tokenizer, temperature=0.0).complete(file, fake)
    assert store_in(tmp_path, tokenizer, temperature=1.0).complete(file, fake) != first
    renderer = ChatRenderer(tokenizer)
    (tmp_path / "model").mkdir()
    local = AnswerStore(tmp_path, renderer, str(tmp_path / "model"), None, {}).complete(file, fake)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"tuned")
    assert AnswerStore(tmp_path, renderer, str(tmp_path / "model"), None, {}).complete(file, fake) != local
    assert len(fake.asked) == 12


def test_unreadable_answers_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert read_answers(path) == {}
    good = json.dumps({"id": "a", "content": "x", "finish_reason": None})
    path.write_text(good + "\n" + '{"id": "b", "con', encoding="utf-8")
    assert read_answers(path) == {"a": ("x", None)}
    path.write_text("[1]\n" + good + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"answers\.jsonl:1: not an answer"):
        read_answers(path)


def test_a_prompt_that_got_no_answer_is_an_error(file: Path, tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="c/a/0: the target gave no answer"):
        store_in(tmp_path, tokenizer).complete(file, lambda *_: None)
