"""How large a package is, part by part, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deepspec.inference.profiles import SCALE

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
SIZE_HEAD = ("part", "parameters", "16-bit", "package", "saved", "of which: copies left out")
DENOMINATORS = {
    0: "all own weights",
    1: "against own weights + one shared matrix",
    2: "against own weights + copies of embedding and head",
}
"""What the package is held against, by the number of the target's matrices that a package with copies ships."""


@dataclass(frozen=True)
class PartSize:
    """Bytes of one part of the drafter."""

    part: str
    parameters: int
    before: int  # as 16-bit floats; integers as they are
    after: int  # in the package, scales included
    left_out: int = 0  # of ``before``: copies of the target's matrices, which are not stored

    @property
    def saved(self) -> float:
        """Share of ``before`` that the package does without."""
        return 1 - self.after / self.before


def part_of(name: str, ndim: int) -> str:
    """Return the part that a tensor belongs to."""
    if name.startswith("layers.") and ndim == 2:
        return LINEARS
    return next((part for part, piece in PARTS.items() if piece in name), OTHER)


def part_sizes(weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> list[PartSize]:
    """Return the size of every part: ``weights`` as 16-bit floats against ``packed`` as it is stored."""
    sizes: dict[str, list[int]] = {}
    for name, tensor in weights.items():
        stored = [packed[n] for n in (name, f"{name}{SCALE}") if n in packed]
        row = sizes.setdefault(part_of(name, tensor.ndim), [0, 0, 0])
        row[0] += tensor.numel()
        row[1] += tensor.numel() * (torch.float16.itemsize if tensor.is_floating_point() else tensor.itemsize)
        row[2] += sum(t.numel() * t.element_size() for t in stored)
    order = [LINEARS, *PARTS, OTHER]
    return [PartSize(part, *sizes[part]) for part in order if part in sizes]


def total(sizes: list[PartSize]) -> PartSize:
    """Return the sum of the parts."""
    return PartSize(
        DENOMINATORS[0], sum(s.parameters for s in sizes), sum(s.before for s in sizes), sum(s.after for s in sizes)
    )


def against(sizes: list[PartSize], copies: int, matrix: int) -> PartSize:
    """Return the whole package against the own weights and ``copies`` matrices of ``matrix`` parameters each."""
    whole, parameters = total(sizes), copies * matrix
    return PartSize(
        DENOMINATORS[copies],
        whole.parameters + parameters,
        whole.before + parameters * torch.float16.itemsize,
        whole.after,
        left_out=parameters * torch.float16.itemsize,
    )


def size_rows(sizes: list[PartSize], vocab_size: int, hidden_size: int) -> list[tuple[str, ...]]:
    """Return the table's rows under ``SIZE_HEAD``.

    Published packages ship copies of the target's embedding and head; this one leaves them out. The last rows say what
    that makes of the saving, and how much of it is owed to the copies alone, so that the two effects are not mixed up.
    """
    matrix = vocab_size * hidden_size
    return [_row(size) for size in (*sizes, *(against(sizes, copies, matrix) for copies in DENOMINATORS))]


def _row(size: PartSize) -> tuple[str, ...]:
    copies = f"{size.left_out / size.before:.1%}" if size.left_out else ""
    return (
        size.part,
        f"{size.parameters:,}",
        mebibytes(size.before),
        mebibytes(size.after),
        f"{size.saved:.1%}",
        copies,
    )


def mebibytes(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size / 2**10:.2f} KiB"
