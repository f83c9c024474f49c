"""Every malformed line is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspec.contracts import Conversation
from deepspec.data.conversations import needs_answer, read_conversations, without_answer, write_conversations
from deepspec.errors import DataError

GOOD = {"id": "a/b/1", "messages": [{"role": "user", "content": "hi"}], "source": "a", "split": "train"}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def test_reads_a_stream_and_allows_unknown_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", GOOD, "", {**GOOD, "id": "a/b/2", "finish_reason": "length"}, "{broken")
    assert list(read_conversations(path, limit=2)) == [
        Conversation("a/b/1", (("user", "hi"),), "a", None),
        Conversation("a/b/2", (("user", "hi"),), "a", "length"),
    ]


def test_round_trip_with_every_kind_of_text(tmp_path: Path) -> None:
    items = [
        Conversation("1", (("system", "s"), ("user", 'ü \u2028 \n"x" 日本')), "", None),
        Conversation("2", (("user", "a"), ("assistant", "\tb")), "chat", "stop"),
    ]
    write_conversations(tmp_path / "new" / "c.jsonl", items)
    assert list(read_conversations(tmp_path / "new" / "c.jsonl")) == items
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["c.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    write_conversations(path, [Conversation("1", (("user", "a"),))])

    def broken() -> Any:
        yield Conversation("2", (("user", "b"),))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_conversations(path, broken())
    assert [c.id for c in read_conversations(path)] == ["1"]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ({"messages": GOOD["messages"]}, "id is missing"),
        ({**GOOD, "id": 3}, "id must be a string"),
        ({"id": "x"}, "messages must be a list"),
        ({"id": "x", "messages": []}, "at least one message"),
        ({"id": "x", "messages": "hi"}, "messages must be a list"),
        ({"id": "x", "messages": ["hi"]}, r"messages\[0\] must be an object"),
        ({"id": "x", "messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\]: role must be one of.*'robot'"),
        ({"id": "x", "messages": [{"role": ["user"], "content": "a"}]}, "role must be one of"),
        ({"id": "x", "messages": [{"role": "user", "content": 3}]}, r"content must be a string, got 3"),
        ({"id": "x", "messages": [{"role": "user"}]}, "content must be a string, got nothing"),
        ({**GOOD, "id": "x", "source": 1}, "source must be a string"),
        ({**GOOD, "id": "x", "finish_reason": "tired"}, "finish_reason must be"),
        (GOOD, r"id 'a/b/1' was used on line 1"),
    ],
)
def test_malformed_lines(tmp_path: Path, line: Any, message: str) -> None:
    path = write(tmp_path / "c.jsonl", GOOD, line)
    with pytest.raises(DataError, match=rf"c\.jsonl:2.*{message}"):
        list(read_conversations(path))


def test_missing_file_and_other_encodings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot read.*data\.train"):
        list(read_conversations(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="cannot read"):
        list(read_conversations(tmp_path))
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_conversations(tmp_path / "latin.jsonl"))


def test_answers_are_missing_or_taken_away() -> None:
    asked = Conversation("1", (("user", "a"),))
    answered = Conversation("1", (("user", "a"), ("assistant", "b")), "", "stop")
    assert needs_answer(asked)
    assert not needs_answer(answered)
    assert without_answer(answered) == asked
    assert without_answer(asked) == asked
