"""The prompts of a conversation file, rendered for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.data.conversations import read_conversations, without_answer
from deepspec.evaluation.acceptance import Prompt

if TYPE_CHECKING:
    from pathlib import Path

    from deepspec.data.chat import ChatRenderer


def domain_of(source: str) -> str:
    """Return the domain of a conversation or sample: its source up to the first ``/``, ``other`` without one."""
    return source.partition("/")[0] or "other"


def read_prompts(path: str | Path, renderer: ChatRenderer, limit: int | None = None) -> list[Prompt]:
    """Return the prompts of ``path``, domain by domain.

    Args:
        path: a conversation file; answers in it are left aside.
        renderer: of the target's chat template.
        limit: at most so many prompts of a domain.
    """
    domains: dict[str, list[Prompt]] = {}
    for conversation in read_conversations(path):
        domain = domain_of(conversation.source)
        chosen = domains.setdefault(domain, [])
        if limit is None or len(chosen) < limit:
            ids = renderer.prompt_ids(without_answer(conversation).messages)
            chosen.append(Prompt(conversation.id, domain, ids))
    return [prompt for prompts in domains.values() for prompt in prompts]
