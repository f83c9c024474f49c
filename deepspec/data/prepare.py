"""Conversation files to tokenised samples, stored once and found again by content.

A set lies in ``<cache>/samples/<key>``. The key hashes all that the samples depend on: the file, the tokenizer with its
template, the template's options, the length and the limit.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspec.contracts import Conversation, Sample
from deepspec.data.chat import ChatRenderer, Dropped
from deepspec.data.conversations import read_conversations
from deepspec.data.samples import VERSION, PrepareReport, SampleSet, load_samples, save_samples
from deepspec.errors import DataError

_CHUNK = 512  # conversations tokenised together


def prepare_samples(
    path: str | Path, renderer: ChatRenderer, cache: str | Path, *, limit: int | None = None
) -> SampleSet:
    """Return the samples of a conversation file, from the cache when they are there.

    Raises:
        DataError: a malformed line, or not one usable sample in the file.
    """
    path = Path(path)
    folder = Path(cache) / "samples" / _key(path, renderer, limit)
    found = load_samples(folder)
    if found is not None:
        return found
    samples = build_samples(read_conversations(path, limit), renderer)
    if not len(samples):
        reasons = "; ".join(f"{n} x {reason}" for reason, n in samples.report.dropped.items()) or "the file is empty"
        raise DataError(f"{path}: not one usable sample ({reasons}); see data.max_length and target.template_options")
    save_samples(folder, samples)
    return samples


def build_samples(conversations: Iterable[Conversation], renderer: ChatRenderer) -> SampleSet:
    """Tokenise conversations, in chunks, and count what was dropped and why."""
    report, dropped, sources = PrepareReport(), Counter[str](), Counter[str]()
    ids: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    kept: list[Sample] = []
    for chunk in _chunks(conversations, _CHUNK):
        for conversation, rendering in zip(chunk, renderer.render_many(chunk), strict=True):
            report.conversations += 1
            report.rewritten_turns += rendering.rewritten_turns
            if isinstance(rendering.result, Dropped):
                dropped[rendering.result.reason] += 1
                continue
            report.cut_answers += conversation.finish_reason == "length"
            sample = rendering.result
            ids.append(np.array(sample.input_ids, dtype=np.int32))
            masks.append(np.array(sample.loss_mask, dtype=np.uint8))
            kept.append(Sample(sample.id, (), (), sample.source))
            sources[sample.source] += 1
    offsets = np.cumsum([0, *(len(row) for row in ids)], dtype=np.int64)
    flat_ids = np.concatenate([np.zeros(0, np.int32), *ids])
    flat_mask = np.concatenate([np.zeros(0, np.uint8), *masks])
    report.samples, report.tokens = len(kept), int(offsets[-1])
    report.supervised_tokens = int(flat_mask.sum(dtype=np.int64))
    report.dropped, report.by_source = dict(dropped), dict(sources)
    return SampleSet(
        torch.from_numpy(flat_ids), torch.from_numpy(flat_mask), torch.from_numpy(offsets),
        [s.id for s in kept], [s.source for s in kept], report,
    )  # fmt: skip


def _chunks(items: Iterable[Conversation], size: int) -> Iterator[list[Conversation]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _key(path: Path, renderer: ChatRenderer, limit: int | None) -> str:
    """Hash everything that the samples depend on."""
    parts: dict[str, Any] = {
        "version": VERSION,
        "file": file_hash(path),
        "tokenizer": tokenizer_hash(renderer.tokenizer),
        "options": renderer.template_options,
        "eos": sorted(renderer.eos_token_ids),
        "max_length": renderer.max_length,
        "limit": limit,
    }
    return content_key(parts)


def content_key(parts: dict[str, Any]) -> str:
    """Return a folder name that stands for ``parts`` (plain values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot read the conversation file ({error.strerror}); see data.train/test") from error


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of vocabulary, merges, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return content_key(
        {"words": words, "template": tokenizer.chat_template, "special": str(tokenizer.special_tokens_map)}
    )
