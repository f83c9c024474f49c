"""Linear layers whose weight is held as INT8 with one scale per output channel.

The weight is ``values * scale``; activations stay as they are (weight-only). On a CPU in bf16 the product runs on the
INT8 values themselves, which is faster there than a bf16 product. In fp32 PyTorch's INT8 kernel is slower than a plain
product, and on other devices it is not everywhere, so the weight is then multiplied out once when it is loaded.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_INT8 = 127


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [o, i] that ``values`` [o, i] int8 and ``scale`` [o, 1] stand for."""
    return (values.to(torch.float32) * scale.to(torch.float32)).to(dtype)


class Int8Linear(nn.Module):
    """A linear layer without bias that multiplies with INT8 values and scales the result per output channel."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        """Hold ``values`` [o, i] int8 and ``scale`` [o, 1]."""
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.register_buffer("weight", values.contiguous())
        self.register_buffer("weight_scale", scale.to(torch.float32).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., i] to [..., o]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        scale = self.weight_scale.to(x.dtype).squeeze(1)
        return torch._weight_int8pack_mm(rows, self.weight, scale).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Say the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, int8 per output channel"


def int8_kernel_pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products on the INT8 values are available, right and faster than multiplied-out weights."""
    return device.type == "cpu" and dtype == torch.bfloat16 and _kernel_is_right()


@lru_cache(maxsize=1)
def _kernel_is_right() -> bool:
    """Compare the kernel, whose name is not a public promise, with a plain product once per process."""
    values = torch.arange(64 * 64).remainder(255).sub(MAX_INT8).view(64, 64).to(torch.int8)
    scale = torch.linspace(0.001, 0.01, 64)[:, None]
    x = torch.linspace(-1, 1, 5 * 64).sin().view(5, 64).bfloat16()
    try:
        got = Int8Linear(values, scale)(x).float()
    except (AttributeError, RuntimeError):
        return False
    want = functional.linear(x.float(), dequantise(values, scale))
    return bool((got - want).norm() <= 0.02 * want.norm())
