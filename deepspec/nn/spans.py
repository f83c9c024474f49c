"""Where the documents of a batch lie, and attention that runs over each of them alone.

Nothing attends from one document of a row to another. A mask over the whole row says so, but the kernels that take a
mask compute what it hides as well: a row of n documents costs n times the attention of its documents. Where no kernel
skips them, attention is run piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from deepspec.contracts import Batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Span(NamedTuple):
    """Positions ``start:stop`` of a row: a document, or several that lie side by side."""

    row: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Queries that see the same keys."""

    row: int
    queries: slice  # of the row's n queries
    keys: tuple[slice, ...]  # of the row's s keys, in this order
    mask: Tensor  # [1, 1, queries, keys] bool, True may be seen

    def of(self, x: Tensor) -> Tensor:
        """Return the piece's keys or values of ``x`` [B, Hkv, s, Dh], as [1, Hkv, keys, Dh]."""
        return torch.cat([x[self.row : self.row + 1, :, part] for part in self.keys], dim=2)


@dataclass(frozen=True)
class Pieces:
    """What takes the place of a mask [B, 1, n, s]: the pieces by row and, in a row, by query; the other queries see
    nothing."""

    pieces: Sequence[Piece]

    def join(self, q: Tensor, width: int, run: Callable[[Piece, Tensor], Tensor]) -> Tensor:
        """Join what ``run`` maps each piece and its queries [1, H, m, Dh] to, [1, H, m, width], to [B, H, n, width]."""
        batch, heads, length, _ = q.shape
        rows: list[list[Tensor]] = [[] for _ in range(batch)]
        done = [0] * batch
        for piece in self.pieces:
            begin, end = piece.queries.start, piece.queries.stop
            if begin > done[piece.row]:
                rows[piece.row].append(q.new_zeros(1, heads, begin - done[piece.row], width))
            rows[piece.row].append(run(piece, q[piece.row : piece.row + 1, :, begin:end]))
            done[piece.row] = end
        for parts, end in zip(rows, done, strict=True):
            if end < length:
                parts.append(q.new_zeros(1, heads, length - end, width))
        return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def document_spans(batch: Batch) -> list[Span]:
    """Return the documents of a batch by row and, in a row, by position. On CUDA the host waits for them."""
    spans = []
    for row, segments in enumerate(batch.segment_ids.cpu()):
        numbers, counts = torch.unique_consecutive(segments, return_counts=True)
        stop = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            start, stop = stop, stop + count
            if number > 0:
                spans.append(Span(row, start, stop))
    return spans


def is_packed(batch: Batch) -> bool:
    """Return whether some row holds several documents. On CUDA the host waits for the answer."""
    return bool((batch.segment_ids > 1).any())


@dataclass(frozen=True)
class Document:
    """A document of a packed row."""

    span: Span
    anchors: slice  # which of the row's A anchors are its own
    batch: Batch  # it alone: one row, no padding

    @property
    def place(self) -> slice:
        """Its positions in the row."""
        return slice(self.span.start, self.span.stop)


def separable(batch: Batch) -> list[Document] | None:
    """Return the documents that have anchors, where running over each of them alone costs less than over rows.

    That is on a CPU, where some row holds several, and the anchors of each lie side by side; None otherwise. Also None
    where no document has an anchor: with nothing to run over, no parameter would get a gradient, not even zeros, and
    ranks that reduce gradients would wait for each other.
    """
    if batch.input_ids.device.type != "cpu" or not is_packed(batch):
        return None
    found = []
    anchored = torch.where(batch.anchor_mask, batch.segment_ids.gather(1, batch.anchor_indices), 0)  # [B, A]
    for span in document_spans(batch):
        own = (anchored[span.row] == batch.segment_ids[span.row, span.start]).nonzero().flatten().tolist()
        if not own:
            continue
        if own[-1] - own[0] + 1 != len(own):
            return None
        found.append(_document(batch, span, slice(own[0], own[-1] + 1)))
    return found or None


def _document(batch: Batch, span: Span, anchors: slice) -> Document:
    indices = batch.anchor_indices[span.row, anchors][None] - span.start
    alone = one_document(batch, span)
    alone = replace(alone, anchor_indices=indices, anchor_mask=torch.ones_like(indices, dtype=torch.bool))
    return Document(span, anchors, alone)


def neighbours(spans: Sequence[Span], most: int) -> list[Span]:
    """Join documents that lie side by side to spans of at most ``most`` tokens; a longer document stays alone."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.row, last.stop) == (span.row, span.start) and span.stop - last.start <= most:
            joined[-1] = last._replace(stop=span.stop)
        else:
            joined.append(span)
    return joined


def one_document(batch: Batch, span: Span) -> Batch:
    """Return a batch of one document alone, without anchors."""
    alone = part_of_row(batch, span)
    return replace(alone, segment_ids=torch.ones_like(alone.segment_ids))


def part_of_row(batch: Batch, span: Span) -> Batch:
    """Return a batch of the tokens of ``span``, without anchors."""
    place = (slice(span.row, span.row + 1), slice(span.start, span.stop))
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=batch.input_ids.device)
    return Batch(
        input_ids=batch.input_ids[place],
        segment_ids=batch.segment_ids[place],
        position_ids=batch.position_ids[place],
        loss_mask=batch.loss_mask[place],
        anchor_indices=nothing,
        anchor_mask=nothing.bool(),
    )
