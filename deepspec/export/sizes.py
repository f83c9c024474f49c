"""How large a package is, part by part, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

PARTS = (
    ("linears of the layers", lambda name, ndim: name.startswith("layers.") and ndim == 2),
    ("norms", lambda name, ndim: "norm" in name),
    ("fusion (fc)", lambda name, ndim: name.startswith("fc.")),
    ("Markov head", lambda name, ndim: name.startswith("markov_head.")),
    ("confidence head", lambda name, ndim: name.startswith("confidence_head.")),
)
OTHER = "other"


@dataclass(frozen=True)
class PartSize:
    """Bytes of one part of the drafter."""

    part: str
    parameters: int
    before: int  # as 16-bit floats
    after: int  # in the package, scales included


def part_of(name: str, ndim: int) -> str:
    """Return the part that a tensor belongs to."""
    return next((part for part, fits in PARTS if fits(name, ndim)), OTHER)


def part_sizes(weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> list[PartSize]:
    """Return the size of every part: ``weights`` as 16-bit floats against ``packed`` as it is stored."""
    sizes: dict[str, list[int]] = {}
    for name, tensor in weights.items():
        stored = [packed[n] for n in (name, f"{name}_scale") if n in packed]
        row = sizes.setdefault(part_of(name, tensor.ndim), [0, 0, 0])
        row[0] += tensor.numel()
        row[1] += tensor.numel() * torch.float16.itemsize
        row[2] += sum(t.numel() * t.element_size() for t in stored)
    order = [part for part, _ in PARTS] + [OTHER]
    return [PartSize(part, *sizes[part]) for part in order if part in sizes]


def total(sizes: list[PartSize], part: str = "all own weights") -> PartSize:
    """Return the sum of the parts."""
    return PartSize(part, sum(s.parameters for s in sizes), sum(s.before for s in sizes), sum(s.after for s in sizes))


def size_rows(sizes: list[PartSize], vocab_size: int, hidden_size: int) -> list[tuple[str, ...]]:
    """Return the table's rows: part, parameters, 16-bit size, package size, saved.

    Published packages ship copies of the target's embedding and head; this one leaves them out. The last rows say what
    that makes of the saving, so that the two effects are not mixed up.
    """
    whole = total(sizes)
    copy = vocab_size * hidden_size * torch.float16.itemsize
    rows = [*sizes, whole]
    rows += [
        PartSize(
            f"against own weights + {text}",
            whole.parameters + n * vocab_size * hidden_size,
            whole.before + n * copy,
            whole.after,
        )
        for n, text in ((1, "one shared matrix"), (2, "copies of embedding and head"))
    ]
    return [
        (s.part, f"{s.parameters:,}", mebibytes(s.before), mebibytes(s.after), f"{1 - s.after / s.before:.1%}")
        for s in rows
    ]


def mebibytes(size: int) -> str:
    """Write a number of bytes for people."""
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 // 10 else f"{size / 2**10:.2f} KiB"
