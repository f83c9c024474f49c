"""Products with few rows on CPU: weights packed in fp16, everything else in fp32.

Decoding multiplies one to a handful of rows with every weight of the model, so its time is the time to read the
weights. FBGEMM's kernel reads them as fp16, half the bytes, and multiplies and accumulates in fp32; and it costs little
more for six rows than for one, where the default product costs twice as much. A weight is packed only if fp16 holds
every value of it exactly, as it does for most checkpoints in bf16 or fp16: then nothing is rounded but the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from deepspec.nn.head import FrozenHead

if TYPE_CHECKING:
    from torch import Tensor

FEW_ROWS = 16  # above, the default product is faster


class PackedWeight:
    """A weight [out, in] with its bias, ready for products with few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, packed: Any) -> None:
        self.weight, self.bias, self._packed = weight, bias, packed

    def product(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., in] fp32 to ``x W^T + b`` [..., out]."""
        rows = x.numel() // x.shape[-1]
        if rows > FEW_ROWS or x.dtype != torch.float32 or (torch.is_grad_enabled() and x.requires_grad):
            return functional.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.reshape(rows, -1), self._packed)
        return out.view(*x.shape[:-1], -1)


def pack_weight(weight: Tensor, bias: Tensor | None = None, *, rounding: bool = False) -> PackedWeight | None:
    """Pack ``weight`` [out, in], or return None where that is impossible or not exact.

    Args:
        weight: fp32 on the CPU.
        bias: [out] fp32, kept as it is.
        rounding: Pack it too when fp16 has to round it.
    """
    fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not fbgemm:
        return None
    half = weight.detach().half()
    if not bool(half.isfinite().all()) or not (rounding or torch.equal(half.float(), weight)):
        return None
    packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), None if bias is None else bias.detach())
    return PackedWeight(weight, bias, packed)


def pack_linears(module: nn.Module, *, rounding: bool = False) -> int:
    """Let the linear layers inside ``module`` use packed weights when they can; return how many do.

    Parameters and state dict stay as they are. The packed copies do not follow a change of the weights.
    """
    count = 0
    for linear in module.modules():
        if type(linear) is nn.Linear:
            packed = pack_weight(linear.weight, linear.bias, rounding=rounding)
            if packed is not None:
                linear.forward = partial(PackedWeight.product, packed)  # type: ignore[method-assign]
                count += 1
    return count


def unpack_linears(module: nn.Module) -> None:
    """Undo ``pack_linears``."""
    for linear in module.modules():
        linear.__dict__.pop("forward", None)


@dataclass(frozen=True)
class PackedHead(FrozenHead):
    """The target's embedding and head, with the head's weight packed as well."""

    packed: PackedWeight | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Map final-normed states [..., D] to the target's logits [..., V]."""
        if self.packed is None:
            return super().logits(hidden)
        return self.finish(self.packed.product(hidden.to(self.weight.dtype)))

    def restricted(self, ids: Tensor) -> FrozenHead:
        """Return the head with the rows ``ids`` [Vd] alone, packed as well."""
        return pack_head(super().restricted(ids))


def pack_head(head: FrozenHead) -> FrozenHead:
    """Return ``head`` with a packed weight, or ``head`` itself where that is impossible."""
    packed = pack_weight(head.weight, head.bias)
    if packed is None:
        return head
    return PackedHead(**{f.name: getattr(head, f.name) for f in fields(FrozenHead)}, packed=packed)
