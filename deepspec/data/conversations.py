"""Conversation files: one JSON object a line, read as a stream and checked line by line.

    {"id": "chat/greeting/0001", "source": "chat", "finish_reason": "stop",
     "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

``id`` and ``messages`` are required. Other keys (``split``, a licence, ...) are allowed and left alone.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.contracts import Conversation
from deepspec.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROLES = ("system", "user", "assistant", "tool")
FINISH_REASONS = ("stop", "length", None)


def read_conversations(path: str | Path, limit: int | None = None) -> Iterator[Conversation]:
    """Yield the conversations of a file in order, the first ``limit`` of them if it is given.

    Raises:
        DataError: the file is missing or not UTF-8, or a line is malformed; the message names the file and the line.
    """
    return islice(_checked_lines(Path(path)), limit)


def write_conversations(path: str | Path, conversations: Iterable[Conversation]) -> None:
    """Write a conversation file under a temporary name, then rename it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for conversation in conversations:
                file.write(to_line(conversation) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_line(conversation: Conversation) -> str:
    """Return the JSON line of a conversation, without the line end."""
    record: dict[str, Any] = {"id": conversation.id, "messages": as_dicts(conversation.messages)}
    if conversation.source:
        record["source"] = conversation.source
    if conversation.finish_reason is not None:
        record["finish_reason"] = conversation.finish_reason
    return json.dumps(record, ensure_ascii=False)


def as_dicts(messages: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Return messages in the form that chat templates take."""
    return [{"role": role, "content": content} for role, content in messages]


def needs_answer(conversation: Conversation) -> bool:
    """Tell whether the conversation ends with a message that the target still has to answer."""
    return conversation.messages[-1][0] != "assistant"


def without_answer(conversation: Conversation) -> Conversation:
    """Return the conversation up to the message that its last answer replies to."""
    messages = conversation.messages
    while len(messages) > 1 and messages[-1][0] == "assistant":
        messages = messages[:-1]
    return replace(conversation, messages=messages, finish_reason=None)


def _checked_lines(path: Path) -> Iterator[Conversation]:
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        where = f"{path}:{number}"
        conversation = parse_line(line, where)
        if conversation.id in seen:
            raise DataError(
                f"{where}: id {conversation.id!r} was used on line {seen[conversation.id]} already; ids must be unique"
            )
        seen[conversation.id] = number
        yield conversation


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start} of a block)") from error
    except OSError as error:
        raise DataError(f"{path}: cannot read the conversation file ({error.strerror}); see data.train/test") from error


def parse_line(line: str, where: str) -> Conversation:
    """Check one JSON line; ``where`` (file:line) starts every error message."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a line must be a JSON object, got {type(record).__name__}")
    reason = record.get("finish_reason")
    if reason not in FINISH_REASONS:
        raise DataError(f'{where}: finish_reason must be "stop", "length" or null, got {reason!r}')
    return Conversation(
        id=_string(record, "id", where, required=True),
        messages=_messages(record.get("messages"), where),
        source=_string(record, "source", where),
        finish_reason=reason,
    )


def _string(record: dict[str, Any], key: str, where: str, *, required: bool = False) -> str:
    value = record.get(key, "")
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} must be a string, got {type(value).__name__}")
    if required and not value:
        raise DataError(f"{where}: {key} is missing or empty")
    return value


def _messages(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: messages must be a list with at least one message, got {_brief(value)}")
    return tuple(_message(item, f"{where}: messages[{i}]") for i, item in enumerate(value))


def _message(value: Any, where: str) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise DataError(f'{where} must be an object with "role" and "content", got {_brief(value)}')
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, got {role!r}")
    if not isinstance(content, str):
        raise DataError(f"{where}: content must be a string, got {_brief(content)}")
    return role, content


def _brief(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
