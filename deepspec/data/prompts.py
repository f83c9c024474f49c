"""The prompts of a conversation file, rendered for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.data.conversations import read_conversations, without_answer
from deepspec.evaluation.acceptance import Prompt

if TYPE_CHECKING:
    from pathlib import Path

    from deepspec.data.chat import ChatRenderer


def read_prompts(path: str | Path, renderer: ChatRenderer, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of ``path``, domain by domain.

    A domain is the conversation's source up to the first ``/``.

    Args:
        path: a conversation file; answers in it are left aside.
        renderer: of the target's chat template.
        limit: at most so many prompts of a domain.
    """
    domains: dict[str, list[Prompt]] = {}
    for conversation in read_conversations(path):
        domain = conversation.source.partition("/")[0] or "other"
        chosen = domains.setdefault(domain, [])
        if limit is None or len(chosen) < limit:
            ids = renderer.prompt_ids(without_answer(conversation).messages)
            chosen.append(Prompt(conversation.id, domain, ids))
    return [prompt for prompts in domains.values() for prompt in prompts]
