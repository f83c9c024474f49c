"""How large a package is, part by part, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

LINEARS = "linears of the layers"
PARTS = {
    "norms": "norm",
    "fusion (fc)": "fc.",
    "projection (eh_proj)": "eh_proj.",
    "Markov head": "markov_head.",
    "confidence head": "confidence_head.",
    "draft vocabulary": "d2t",
}
"""What the names of a part's tensors contain; ``LINEARS`` are the matrices of the layers."""
OTHER = "other"


@dataclass(frozen=True)
class PartSize:
    """Bytes of one part of the drafter."""

    part: str
    parameters: int
    before: int  # as 16-bit floats; integers as they are
    after: int  # in the package, scales included


def part_of(name: str, ndim: int) -> str:
    """Return the part that a tensor belongs to."""
    if name.startswith("layers.") and ndim == 2:
        return LINEARS
    return next((part for part, piece in PARTS.items() if piece in name), OTHER)


def part_sizes(weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> list[PartSize]:
    """Return the size of every part: ``weights`` as 16-bit floats against ``packed`` as it is stored."""
    sizes: dict[str, list[int]] = {}
    for name, tensor in weights.items():
        stored = [packed[n] for n in (name, f"{name}_scale") if n in packed]
        row = sizes.setdefault(part_of(name, tensor.ndim), [0, 0, 0])
        row[0] += tensor.numel()
        row[1] += tensor.numel() * (torch.float16.itemsize if tensor.is_floating_point() else tensor.itemsize)
        row[2] += sum(t.numel() * t.element_size() for t in stored)
    order = [LINEARS, *PARTS, OTHER]
    return [PartSize(part, *sizes[part]) for part in order if part in sizes]


def total(sizes: list[PartSize], part: str = "all own weights") -> PartSize:
    """Return the sum of the parts."""
    return PartSize(part, sum(s.parameters for s in sizes), sum(s.before for s in sizes), sum(s.after for s in sizes))


def size_rows(sizes: list[PartSize], vocab_size: int, hidden_size: int) -> list[tuple[str, ...]]:
    """Return the table's rows: part, parameters, 16-bit size, package size, saved.

    Published packages ship copies of the target's embedding and head; this one leaves them out. The last rows say what
    that makes of the saving, so that the two effects are not mixed up.
    """
    rows = [*sizes, total(sizes)]
    for copies, text in ((1, "one shared matrix"), (2, "copies of embedding and head")):
        rows.append(_with_copies(total(sizes), copies * vocab_size * hidden_size, text))
    return [_row(size) for size in rows]


def _with_copies(whole: PartSize, parameters: int, text: str) -> PartSize:
    before = whole.before + parameters * torch.float16.itemsize
    return PartSize(f"against own weights + {text}", whole.parameters + parameters, before, whole.after)


def _row(size: PartSize) -> tuple[str, ...]:
    saved = f"{1 - size.after / size.before:.1%}"
    return (size.part, f"{size.parameters:,}", mebibytes(size.before), mebibytes(size.after), saved)


def mebibytes(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.2f} KiB"
