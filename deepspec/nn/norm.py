"""RMSNorm, the one norm of every drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last dimension; the mean square is taken in fp32 whatever the input is."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., width]."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)

    def extra_repr(self) -> str:
        """Say width and eps when the module is printed."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
