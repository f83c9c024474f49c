"""The test conversations on which a package is compared with the trained drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.contracts import Sample
from deepspec.data.conversations import read_conversations, without_answer
from deepspec.errors import DataError
from deepspec.export.verify import Material

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from deepspec.contracts import Conversation
    from deepspec.data.chat import ChatRenderer

SAMPLES = 24
MAX_NEW_TOKENS = 64


def read_material(
    path: str | Path, renderer: ChatRenderer, *, prompts: int, max_new_tokens: int, stop_ids: Collection[int] = ()
) -> Material:
    """Take ``prompts`` prompts and some samples, evenly spread over a conversation file.

    Args:
        path: The file (``data.test``).
        renderer: The target's chat template.
        prompts: How many prompts are decoded.
        max_new_tokens: Longest decoded text; no more than is needed for the comparison.
        stop_ids: Tokens that end a text.

    Raises:
        DataError: The file cannot be read, or holds no conversation.
    """
    conversations = list(read_conversations(path))
    if not conversations:
        raise DataError(f"{path} holds no conversation: correct data.test")
    rendered = [renderer.render(conversation) for conversation in spread(conversations, SAMPLES)]
    return Material(
        samples=[sample for sample in rendered if isinstance(sample, Sample)],
        prompts=[renderer.prompt_ids(without_answer(c).messages) for c in spread(conversations, prompts)],
        stop_ids=frozenset(stop_ids),
        max_new_tokens=min(max_new_tokens, MAX_NEW_TOKENS),
    )


def spread(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """Return at most ``count`` conversations, evenly spaced."""
    if len(conversations) <= count:
        return list(conversations)
    return [conversations[n * len(conversations) // count] for n in range(count)]
