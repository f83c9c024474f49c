"""Where the answers lie of a conversation file whose prompts the target still has to answer.

A file whose conversations all end with an answer is used as it is. For any other there is a folder
``<cache>/answers/<key>``, where the key stands for the file and for all that an answer depends on (the target, its
tokenizer and template, the settings of generation). ``answered-all.jsonl`` in it holds the conversations of the file,
answered (``answered-N.jsonl`` the first N of them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspec.contracts import Conversation
from deepspec.data.chat import ChatRenderer
from deepspec.data.conversations import needs_answer, read_conversations, write_conversations
from deepspec.data.prepare import content_key, file_hash, tokenizer_hash
from deepspec.errors import DataError

Answerer = Callable[[Sequence[Conversation], Path], object]
"""Answers conversations and writes them to a file; goes on with what is there when it was interrupted."""


@dataclass(frozen=True)
class AnswerStore:
    """The answers of one target with one set of generation settings."""

    cache: Path
    renderer: ChatRenderer
    target: str  # folder or hub id
    revision: str | None
    settings: Mapping[str, Any]  # of generation; ``batch_size`` does not matter

    def file(self, path: str | Path, limit: int | None = None) -> Path:
        """Return the file with every conversation answered: ``path`` itself, or the stored one.

        Raises:
            DataError: answers are missing; the message says which command gives them.
        """
        path = Path(path)
        missing = sum(map(needs_answer, read_conversations(path, limit)))
        if not missing:
            return path
        stored = self._stored(path, limit, "answered")
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
        open_ones = [c for c in conversations if needs_answer(c)]
        if not open_ones:
            return path
        stored, given = self._stored(path, limit, "answered"), self._stored(path, limit, "given")
        if not stored.is_file():
            answer(open_ones, given)
            answers = {c.id: c for c in read_conversations(given)}
            write_conversations(stored, [answers.get(c.id, c) for c in conversations])
            given.unlink()
        return stored

    def _stored(self, path: Path, limit: int | None, what: str) -> Path:
        settings = {name: value for name, value in self.settings.items() if name != "batch_size"}
        parts = {
            "file": file_hash(path),
            "target": target_identity(self.target, self.revision),
            "tokenizer": tokenizer_hash(self.renderer.tokenizer),
            "options": self.renderer.template_options,
            "settings": settings,
        }
        return Path(self.cache) / "answers" / content_key(parts) / f"{what}-{'all' if limit is None else limit}.jsonl"


def target_identity(target: str, revision: str | None) -> list[Any]:
    """Return what tells one target's weights from another's without reading them."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        return [target, revision]
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    return [str(folder.resolve()), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]]
