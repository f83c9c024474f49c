"""The attention call of a block drafter's layer by back end, value and gradient.

    python -m tests.bench.attention                   # the heads of the quickstart's target
    python -m tests.bench.attention --heads 32 --kv-heads 8 --head-dim 128 --contexts 4096 --anchors 512
    python -m tests.bench.attention --quick           # a tiny size: does the code still run

One row of text: T positions of context, A anchors spread over it, each with a block of gamma slots; a mask keeps blocks
apart. FlexAttention runs on CUDA alone. Ratios are of pairs that ran one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepspec.contracts import Batch
from deepspec.log import emit
from deepspec.nn.attention import AttentionBackend, Visible, attend
from deepspec.nn.masks import block_visibility
from tests.bench import common
from tests.bench.common import Measured

BACKENDS: tuple[AttentionBackend, ...] = ("sdpa", "eager")
REFERENCE = "eager"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COLUMNS = ("T", "A", "back end", "s", "peak GB", f"{REFERENCE} / it")


def blocks(context: int, anchors: int, device: torch.device) -> Batch:
    """Return one supervised row of T tokens with its anchors."""
    ids = torch.zeros(1, context, dtype=torch.int64, device=device)
    return Batch(
        input_ids=ids,
        segment_ids=ids + 1,
        position_ids=torch.arange(context, device=device)[None],
        loss_mask=torch.ones_like(ids, dtype=torch.bool),
        anchor_indices=torch.linspace(1, context - 2, anchors, device=device).long()[None],
        anchor_mask=torch.ones(1, anchors, dtype=torch.bool, device=device),
    )


def heads_of(arguments: Any, context: int, slots: int, device: torch.device) -> list[Tensor]:
    """Return random queries [1, H, A*K, Dh], keys and values [1, Hkv, T + A*K, Dh]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(arguments.heads, slots), *[(arguments.kv_heads, context + slots)] * 2]
    made = [torch.randn(1, *shape, arguments.head_dim, generator=generator) for shape in shapes]
    return [x.to(device, DTYPES[arguments.dtype]).requires_grad_() for x in made]


def run(backend: AttentionBackend, heads: Sequence[Tensor], mask: Visible) -> None:
    """Attend, and push a gradient through."""
    q, k, v = heads
    attend(q, k, v, mask, backend=backend).sum().backward()
    for x in heads:
        x.grad = None


def compare(arguments: Any, context: int, anchors: int, device: torch.device) -> None:
    """Time all back ends at one size; write a row for each."""
    heads = heads_of(arguments, context, anchors * arguments.gamma, device)
    seen = block_visibility(blocks(context, anchors, device), arguments.gamma)

    def timed(backend: AttentionBackend) -> Callable[[int], Measured]:
        return lambda _turn: common.measure(partial(run, backend, heads, seen.for_kernel(backend)), device)

    names = ("flex", *BACKENDS) if device.type == "cuda" else BACKENDS
    results = common.in_turn({name: timed(name) for name in names}, arguments.repeats, arguments.budget)
    for name, found in results.items():
        ratio = common.times(common.median_ratio(results[REFERENCE], found)) if name != REFERENCE else ""
        peak = common.gigabytes(common.highest_peak(found))
        common.emit_row([str(context), str(anchors), name, f"{common.median_seconds(found):.4f}", peak, ratio])


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--anchors", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, help="fp32 on a CPU, bf16 on CUDA")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--repeats", type=int, default=7, help="runs after one that warms up")
    parser.add_argument("--budget", type=float, default=20, help="seconds after which a back end is not run again")
    arguments = parser.parse_args(argv)
    device = common.choose_device(arguments.device)
    arguments.dtype = arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")
    if arguments.quick:
        arguments.contexts, arguments.anchors, arguments.repeats = [32], [4], 1
    common.emit_header("tests.bench.attention", device, argv)
    emit(
        f"{arguments.heads} heads, {arguments.kv_heads} of keys and values, of width {arguments.head_dim}; "
        f"gamma {arguments.gamma}, {arguments.dtype}, medians of up to {arguments.repeats} runs\n"
    )
    common.emit_columns(COLUMNS)
    for context in arguments.contexts:
        for anchors in arguments.anchors:
            compare(arguments, context, anchors, device)


if __name__ == "__main__":
    main()
