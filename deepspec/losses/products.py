"""The head's products and logits, with fp32 results whatever its weights are stored in.

A CPU has no low-precision product with fp32 output; there the weights are widened tile by tile. So they are where a
product in their own precision would be emulated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.nn.head import FrozenHead

TILE = 8192  # vocabulary rows widened at a time


def project(x: Tensor, weight: Tensor, out: Tensor, *, in_weight_precision: bool = False) -> None:
    """Write ``x weight^T`` into ``out`` [n, V], for x [n, D] and weight [V, D].

    ``in_weight_precision`` multiplies in the precision of the weights where the device can; otherwise low-precision
    weights are widened unless ``x`` is just as narrow and the device returns wide results.
    """
    if weight.dtype == out.dtype:
        torch.mm(x.to(out.dtype), weight.t(), out=out)
    elif x.is_cuda and (in_weight_precision or x.dtype == weight.dtype):
        out.copy_(torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32))
    elif in_weight_precision and cpu_multiplies(weight.dtype):
        out.copy_(torch.mm(x.to(weight.dtype), weight.t()))
    else:
        wide = x.to(out.dtype)
        for tile in _tiles(weight):
            torch.mm(wide, weight[tile].to(out.dtype).t(), out=out[:, tile])


def add_project(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Add ``x weight^T`` to ``out`` [n, V], for x [n, r] in the precision of ``out`` and weight [V, r]."""
    for tile in [slice(None)] if weight.dtype == out.dtype else _tiles(weight):
        out[:, tile].addmm_(x, weight[tile].to(out.dtype).t())


def back_project(grad: Tensor, weight: Tensor, out: Tensor, *, in_weight_precision: bool = False) -> None:
    """Write ``grad weight`` into ``out`` [n, D], for grad [n, V] and weight [V, D]."""
    if weight.dtype == out.dtype:
        torch.mm(grad, weight, out=out)
    elif grad.is_cuda and in_weight_precision:
        out.copy_(torch.mm(grad.to(weight.dtype), weight, out_dtype=torch.float32))
    elif in_weight_precision and cpu_multiplies(weight.dtype):
        out.copy_(torch.mm(grad.to(weight.dtype), weight))
    else:
        out.zero_()
        for tile in _tiles(weight):
            out.addmm_(grad[:, tile], weight[tile].to(out.dtype))


def finish(raw: Tensor, head: FrozenHead, *, with_slope: bool) -> Tensor | None:
    """Apply bias, scale and soft-cap to ``raw`` in place; return d softcap / d input when it is wanted and not 1."""
    if head.bias is not None:
        raw.add_(head.bias.to(raw.dtype))
    if head.logit_scale != 1.0:
        raw.mul_(head.logit_scale)
    if head.logit_softcap is None:
        return None
    raw.div_(head.logit_softcap).tanh_()
    slope = 1.0 - raw.square() if with_slope else None
    raw.mul_(head.logit_softcap)
    return slope


def whole_sums(states: Tensor, head: FrozenHead) -> tuple[Tensor, Tensor]:
    """Return log sum exp [n] of the head's fp32 logits of ``states`` [n, D], and their largest entry's place [n]."""
    logits = torch.empty(len(states), head.vocab_size, device=states.device)
    project(states, head.weight, logits)
    finish(logits, head, with_slope=False)
    top = logits.argmax(-1)
    largest = logits.gather(-1, top[:, None]).squeeze(-1)
    return largest - logits.softmax(-1).amax(-1).log(), top  # softmax takes a third of logsumexp's time on a CPU


CPU_FLAGS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_amx_fp16_supported",),
}
"""What ``torch.cpu`` is asked: one of them has to hold."""


@lru_cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Return whether this CPU has products of ``dtype``. PyTorch emulates those it has not, up to 100 times slower."""
    names = CPU_FLAGS.get(dtype)
    return names is None or any(getattr(torch.cpu, name, lambda: False)() for name in names)


def _tiles(weight: Tensor) -> list[slice]:
    return [slice(start, start + TILE) for start in range(0, weight.shape[0], TILE)]
