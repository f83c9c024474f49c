"""The test conversations on which a package is compared with the trained drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from deepspec.contracts import Sample
from deepspec.data.conversations import read_conversations
from deepspec.data.prompts import domain_of, read_prompts
from deepspec.errors import DataError
from deepspec.export.verify import Material

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from deepspec.contracts import Conversation
    from deepspec.data.chat import ChatRenderer

T = TypeVar("T")
MAX_NEW_TOKENS = 64


def read_material(
    path: str | Path,
    renderer: ChatRenderer,
    *,
    prompts: int,
    samples: int,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> Material:
    """Take prompts and samples out of a conversation file, evenly spread.

    Args:
        path: The file (``data.test``).
        renderer: The target's chat template.
        prompts: How many prompts are decoded.
        samples: How many conversations of each domain are compared.
        max_new_tokens: Longest decoded text; no more than is needed for the comparison.
        stop_ids: Tokens that end a text.

    Raises:
        DataError: The file cannot be read, or holds no conversation.
    """
    conversations = list(read_conversations(path))
    if not conversations:
        raise DataError(f"{path} holds no conversation: correct data.test")
    rendered = [renderer.render(conversation) for conversation in of_each_domain(conversations, samples)]
    chosen = spread(read_prompts(path, renderer), prompts)
    return Material(
        samples=[sample for sample in rendered if isinstance(sample, Sample)],
        prompts=[prompt.ids for prompt in chosen],
        stop_ids=frozenset(stop_ids),
        max_new_tokens=min(max_new_tokens, MAX_NEW_TOKENS),
        prompt_domains=[prompt.domain for prompt in chosen],
    )


def of_each_domain(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """Return at most ``count`` conversations of each domain, domain by domain."""
    domains: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        domains.setdefault(domain_of(conversation.source), []).append(conversation)
    return [conversation for group in domains.values() for conversation in spread(group, count)]


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[n * len(items) // count] for n in range(count)]
