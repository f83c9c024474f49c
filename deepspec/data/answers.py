"""Conversation files whose prompts the target still has to answer.

A file whose conversations all end with an answer is used as it is. For any other, the answers lie in
``<cache>/answers/<key>``, where the key stands for the file and for all that an answer depends on (the target, its
tokenizer and template, the settings of generation):

    answers.jsonl          {"id", "content", "finish_reason"}, appended as each answer is finished, in any order
    answered-all.jsonl     the conversations of the file, answered (answered-N.jsonl for the first N)

An interrupted run goes on with the ids that ``answers.jsonl`` does not hold yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspec.contracts import Conversation
from deepspec.data.chat import ChatRenderer
from deepspec.data.conversations import needs_answer, read_conversations, write_conversations
from deepspec.data.prepare import content_key, file_hash, tokenizer_hash
from deepspec.errors import DataError

Answerer = Callable[[Sequence[Conversation], Path], None]
"""Answers conversations and appends one JSON line an answer to the file."""


@dataclass(frozen=True)
class AnswerStore:
    """The answers of one target with one set of generation settings."""

    cache: Path
    renderer: ChatRenderer
    target: str  # folder or hub id
    revision: str | None
    settings: Mapping[str, Any]

    def file(self, path: str | Path, limit: int | None = None) -> Path:
        """Return the file with every conversation answered: ``path`` itself, or the stored one.

        Raises:
            DataError: answers are missing; the message says which command gives them.
        """
        path = Path(path)
        missing = sum(map(needs_answer, read_conversations(path, limit)))
        if not missing:
            return path
        stored = self._answered(path, limit)
        if stored.is_file():
            return stored
        raise DataError(
            f"{path}: {missing} conversations have no answer yet; run python -m deepspec.prepare with the same recipe, "
            "target, data and generate keys first"
        )

    def complete(self, path: str | Path, answer: Answerer, limit: int | None = None) -> Path:
        """Let ``answer`` give what is missing, then return the file with every conversation answered."""
        path = Path(path)
        conversations = list(read_conversations(path, limit))
        prompts = [c for c in conversations if needs_answer(c)]
        answered = self._answered(path, limit)
        if not prompts or answered.is_file():
            return answered if prompts else path
        store = self._folder(path) / "answers.jsonl"
        store.parent.mkdir(parents=True, exist_ok=True)
        answer(prompts, store)
        write_conversations(answered, merge_answers(conversations, read_answers(store)))
        return answered

    def _answered(self, path: Path, limit: int | None) -> Path:
        return self._folder(path) / f"answered-{'all' if limit is None else limit}.jsonl"

    def _folder(self, path: Path) -> Path:
        parts = {
            "file": file_hash(path),
            "target": target_identity(self.target, self.revision),
            "tokenizer": tokenizer_hash(self.renderer.tokenizer),
            "options": self.renderer.template_options,
            "settings": dict(self.settings),
        }
        return Path(self.cache) / "answers" / content_key(parts)


def read_answers(path: Path) -> dict[str, tuple[str, str | None]]:
    """Return id -> (content, finish_reason); a last line that was cut by a kill is left out."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    answers = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            answers[record["id"]] = (record["content"], record["finish_reason"])
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise DataError(
                    f"{path}:{number}: not an answer ({error}); delete the line to have it made again"
                ) from error
    return answers


def merge_answers(
    conversations: Sequence[Conversation], answers: Mapping[str, tuple[str, str | None]]
) -> Iterator[Conversation]:
    """Yield the conversations, each prompt with its answer behind it.

    Raises:
        DataError: an answer is missing.
    """
    for conversation in conversations:
        if not needs_answer(conversation):
            yield conversation
            continue
        if conversation.id not in answers:
            raise DataError(f"{conversation.id}: the target gave no answer; run python -m deepspec.prepare again")
        content, reason = answers[conversation.id]
        messages = (*conversation.messages, ("assistant", content))
        yield replace(conversation, messages=messages, finish_reason=reason)


def target_identity(target: str, revision: str | None) -> list[Any]:
    """Return what tells one target's weights from another's without reading them."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        return [target, revision]
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    return [str(folder.resolve()), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]]
