"""Linear layers whose weight is held as INT8 with one scale per output channel.

The weight is ``values * scale``. *Weight-only* leaves activations as they are. On a CPU in bf16 the product runs on the
INT8 values themselves, which is faster there than a bf16 product. In fp32 PyTorch's INT8 kernel is slower than a plain
product, and on other devices it is not everywhere, so the weight is then multiplied out once when it is loaded.

*Dynamic* (W8A8) rounds activations too: each token's row gets a scale of its own as it comes, ``max|x| / 127``, and the
product is one of integers. Its sums are exact, whatever computes them, so every device gives the same numbers up to the
rounding of the two scales.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_INT8 = 127
EXACT_COLUMNS = 1024
"""Products of INT8 values that fp32 adds up without rounding: 1024 * 127^2 < 2^24."""
CUDA_ROWS, CUDA_MULTIPLE = 17, 8
"""What ``torch._int_mm`` asks for on CUDA: so many rows at least, and widths that are multiples of 8."""


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [o, i] that ``values`` [o, i] int8 and ``scale`` [o, n] stand for, a scale to i/n columns."""
    grouped = values.to(torch.float32).unflatten(1, (scale.shape[1], -1))  # [o, n, i/n]
    return (grouped * scale.to(torch.float32)[..., None]).flatten(1).to(dtype)


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


class Int8DynamicLinear(Int8Linear):
    """The same, and its input is rounded to INT8 too, token by token: a product of integers."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., i] to [..., o]."""
        rows, scale = quantise_tokens(x.reshape(-1, self.in_features))
        product = integer_product(rows, self.weight).to(torch.float32)  # [n, o]
        out = product * scale * self.weight_scale.to(torch.float32).T
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Say the shape."""
        return f"in_features={self.in_features}, out_features={self.out_features}, int8 weights and activations"


def quantise_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``values`` [n, i] int8 and ``scale`` [n, 1] fp32 with ``x`` [n, i] close to ``values * scale``."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(dim=1, keepdim=True) / MAX_INT8
    scale = torch.where(scale > torch.finfo(torch.float32).tiny, scale, torch.ones_like(scale))
    return (wide / scale).round().clamp(-MAX_INT8, MAX_INT8).to(torch.int8), scale


def integer_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows`` [n, i] int8 times ``weight`` [o, i] int8, [n, o], the sums exact.

    On CUDA by PyTorch's INT8 product where the shapes allow it. On a CPU that operator is slower than fp32 (measured
    without VNNI: 38 ms against 12 ms for 6 rows and 2560 x 2560), and fp32 is exact over few enough columns.
    """
    if rows.device.type == "cuda" and all(size % CUDA_MULTIPLE == 0 for size in weight.shape):
        missing = max(0, CUDA_ROWS - len(rows))
        return torch._int_mm(functional.pad(rows, (0, 0, 0, missing)), weight.T)[: len(rows)]
    return exact_product(rows, weight)


def exact_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return the integer product [n, o] by fp32 products of so few columns that nothing is rounded, added in fp64."""
    total = torch.zeros(len(rows), len(weight), dtype=torch.float64, device=rows.device)
    for first in range(0, rows.shape[1], EXACT_COLUMNS):
        part = slice(first, first + EXACT_COLUMNS)
        total += functional.linear(rows[:, part].to(torch.float32), weight[:, part].to(torch.float32))
    return total


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
