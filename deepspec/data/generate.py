"""Answers of the target to prompts that have none, generated here in one large batch.

All rows of the batch end at the same column of one key-value cache, so a row that starts late simply starts further to
the right. A finished row's place is given to the next prompt at once: the batch stays full until the prompts run out,
then shrinks. What all prompts share at the front (a system prompt) is computed once.

Each answer depends on the seed and the prompt's id only: a sampled row draws from its own generator. (Two batches of
different size may round differently in the last bit, which can flip a greedy choice between two tokens that tie.)
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING

import torch

from deepspec.errors import DataError
from deepspec.targets.cache import GrowingLayer, TargetCache

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from torch import Tensor

    from deepspec.config.schema import GenerateConfig
    from deepspec.targets.target import Target

PHRASE = 8  # tokens; an answer that says the same ones over and over teaches a drafter nothing
SHIFT_COLUMNS = 128  # unused columns on the left that are worth moving the cache for


@dataclass(frozen=True)
class Answer:
    """What the target said to one prompt; ``tokens`` go without the token that ended it."""

    id: str
    tokens: tuple[int, ...]
    finish_reason: str  # stop: the target ended it; length: it was cut


@dataclass
class _Row:
    id: str
    generator: torch.Generator
    start: int = 0  # column of the cache that holds the row's first token
    tokens: list[int] = field(default_factory=list)
    said: Counter[tuple[int, ...]] = field(default_factory=Counter)
    repeats: int = 0  # how often the row has said its most frequent PHRASE tokens in a row

    def say(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        if len(self.tokens) >= PHRASE:
            phrase = tuple(self.tokens[-PHRASE:])
            self.said[phrase] += 1
            self.repeats = max(self.repeats, self.said[phrase])


def answer_prompts(
    target: Target, prompts: Sequence[tuple[str, Sequence[int]]], config: GenerateConfig, stop_ids: Collection[int]
) -> Iterator[Answer]:
    """Yield the answers to ``prompts`` (id, token ids), each as soon as it is finished.

    Raises:
        DataError: a prompt is empty.
    """
    if empty := [name for name, ids in prompts if not ids]:
        raise DataError(f"prompt {empty[0]!r} has no tokens")
    if prompts:
        yield from _Batch(target, prompts, config, frozenset(stop_ids)).run()


class _Batch:
    """The rows that are being answered; row r of the cache belongs to ``rows[r]``."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[tuple[str, Sequence[int]]],
        config: GenerateConfig,
        stop_ids: frozenset[int],
    ) -> None:
        self.target, self.config, self.stop_ids = target, config, stop_ids
        # The longest first: whatever is started later then fits to the left of the common edge.
        self.waiting = deque(sorted(prompts, key=lambda item: -len(item[1])))
        longest = len(self.waiting[0][1])
        shared = len(commonprefix([list(ids) for _, ids in prompts]))
        self.shared = min(shared, len(self.waiting[-1][1]) - 1)  # a prompt's last token is always run for itself
        self.scratch = target.new_cache(longest)
        if self.shared:
            self._forward(self.waiting[0][1][: self.shared])
        self.cache = TargetCache(longest + config.max_new_tokens + SHIFT_COLUMNS)
        self.edge = longest
        self.rows: list[_Row] = []

    @torch.no_grad()
    def run(self) -> Iterator[Answer]:
        """Answer every prompt."""
        capacity = min(self.config.batch_size, len(self.waiting))
        while self.waiting and len(self.rows) < capacity:
            yield from self._start(slot=len(self.rows), capacity=capacity)
        self._keep(range(len(self.rows)))
        while self.rows:
            self._step()
            for slot in [slot for slot, row in enumerate(self.rows) if self._finished(row)]:
                yield self._answer(self.rows[slot])
                self.rows[slot].id = ""
                yield from self._start(slot, capacity)
            if not all(row.id for row in self.rows):
                self._keep([slot for slot, row in enumerate(self.rows) if row.id])
            self._shift()

    def _start(self, slot: int, capacity: int) -> Iterator[Answer]:
        """Put the next waiting prompt into ``slot``; answers that end with their first token are yielded at once."""
        while self.waiting:
            name, ids = self.waiting.popleft()
            row = _Row(name, _generator(self.config.seed, name), start=self.edge - len(ids))
            hidden = self._forward(ids[self.shared :])
            row.say(self._choose(self.target.head.logits(hidden[:, -1]), [row])[0])
            if not self._finished(row):
                self._place(row, slot, capacity)
                self.scratch.crop_to(self.shared)
                return
            self.scratch.crop_to(self.shared)
            yield self._answer(row)

    def _forward(self, ids: Sequence[int]) -> Tensor:
        """Append one prompt's tokens to the scratch cache; return their states [1, t, D]."""
        return self.target.forward_cached(torch.tensor([list(ids)], device=self.target.device), self.scratch)

    def _place(self, row: _Row, slot: int, capacity: int) -> None:
        """Copy the scratch cache into columns start .. edge of row ``slot``."""
        if slot == len(self.rows):
            self.rows.append(row)
        self.rows[slot] = row
        for index, source in enumerate(self.scratch.layers):
            if len(self.cache.layers) <= index:
                self.cache.layers.append(_empty_like(source, capacity, self.cache.max_length))
            goal = self.cache.layers[index]
            goal.length = self.edge
            columns = slice(row.start, self.edge)
            goal.key_buffer[slot, :, columns] = source.key_buffer[0, :, : source.length]
            goal.value_buffer[slot, :, columns] = source.value_buffer[0, :, : source.length]

    def _step(self) -> None:
        """Append one token to every row."""
        device = self.target.device
        starts = torch.tensor([row.start for row in self.rows], device=device)
        hidden = self.target.forward_cached(
            torch.tensor([row.tokens[-1:] for row in self.rows], device=device),
            self.cache,
            attention_mask=torch.arange(self.edge + 1, device=device) >= starts[:, None],  # [B, columns]
            position_ids=(self.edge - starts)[:, None],
        )
        self.edge += 1
        chosen = self._choose(self.target.head.logits(hidden[:, -1]), self.rows)
        for row, token in zip(self.rows, chosen, strict=True):
            row.say(token)

    def _choose(self, logits: Tensor, rows: Sequence[_Row]) -> list[int]:
        return choose_tokens(logits, [row.generator for row in rows], self.config.temperature)

    def _finished(self, row: _Row) -> bool:
        config = self.config
        looping = config.max_repeats is not None and row.repeats >= config.max_repeats
        return row.tokens[-1] in self.stop_ids or len(row.tokens) >= config.max_new_tokens or looping

    def _answer(self, row: _Row) -> Answer:
        stopped = row.tokens[-1] in self.stop_ids
        return Answer(row.id, tuple(row.tokens[:-1] if stopped else row.tokens), "stop" if stopped else "length")

    def _keep(self, slots: Sequence[int]) -> None:
        """Drop every other row."""
        self.rows = [self.rows[slot] for slot in slots]
        index = torch.tensor(list(slots), dtype=torch.long, device=self.target.device)
        for layer in self.cache.layers:
            layer.remap(lambda buffer: buffer[index])

    def _shift(self) -> None:
        """Move the cache to the left when no row uses its first columns any more."""
        unused = min((row.start for row in self.rows), default=0)
        unused = min(unused, self.edge - (len(self.waiting[0][1]) if self.waiting else 0))
        if unused < SHIFT_COLUMNS:
            return
        for layer in self.cache.layers:
            layer.remap(lambda buffer: buffer.roll(-unused, dims=2))
            layer.length -= unused
        for row in self.rows:
            row.start -= unused
        self.edge -= unused


def choose_tokens(logits: Tensor, generators: Sequence[torch.Generator], temperature: float) -> list[int]:
    """Choose a token for each row of ``logits`` [B, V]; row b draws one number from ``generators[b]``."""
    if temperature == 0:
        greedy: list[int] = logits.argmax(dim=-1).tolist()
        return greedy
    ladder = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)  # [B, V]
    draws = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    # The first token whose step of the ladder lies above the draw: one of probability 0 has no step and is never taken.
    heights = draws.to(ladder.device)[:, None] * ladder[:, -1:]
    tokens: list[int] = torch.searchsorted(ladder, heights, right=True)[:, 0].tolist()
    return tokens


def _empty_like(source: GrowingLayer, rows: int, capacity: int) -> GrowingLayer:
    """Return an empty layer of ``rows`` rows; zeros, because a masked column's NaN would still spoil its row."""
    layer = GrowingLayer(capacity)
    layer.lazy_initialization(
        *(buffer[:, :, :1].expand(rows, -1, -1, -1) for buffer in (source.key_buffer, source.value_buffer))
    )
    layer.key_buffer.zero_()
    layer.value_buffer.zero_()
    return layer


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
