"""Products with INT8 weights, and with INT8 activations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from deepspec.export.quantise import quantise_rows
from deepspec.nn.int8 import (
    Int8DynamicLinear,
    Int8Linear,
    dequantise,
    exact_product,
    int8_kernel_pays,
    integer_product,
    quantise_tokens,
)

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_equals_the_multiplied_out_weight(dtype: torch.dtype) -> None:
    values, scale = quantise_rows(torch.randn(48, 32))
    x = torch.randn(2, 5, 32).to(dtype)
    want = functional.linear(x.float(), dequantise(values, scale))
    error = (Int8Linear(values, scale)(x).float() - want).norm() / want.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)  # bf16 keeps 8 bits of the result


def test_the_int8_kernel_is_used_where_it_pays() -> None:
    cpu = torch.device("cpu")
    assert not int8_kernel_pays(cpu, torch.float32)
    assert not int8_kernel_pays(cpu, torch.float16)
    assert not int8_kernel_pays(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("columns", [5, 1024, 1025, 9728])
def test_the_emulated_integer_product_is_exact_at_its_largest(columns: int) -> None:
    """All values at their largest: a sum in plain fp32 would lose bits beyond 1024 columns."""
    rows = torch.full((3, columns), 127, dtype=torch.int8)
    weight = torch.full((2, columns), -127, dtype=torch.int8)
    rows[1], weight[1] = torch.arange(columns).remainder(255).sub(127), -126
    want = rows.long() @ weight.long().T
    assert exact_product(rows, weight).long().equal(want)


def test_the_emulation_equals_pytorchs_own_integer_product() -> None:
    rows, weight = (torch.randint(-127, 128, (n, 2000), dtype=torch.int8) for n in (6, 16))
    assert exact_product(rows, weight).equal(torch._int_mm(rows, weight.T).double())
    assert integer_product(rows, weight).equal(exact_product(rows, weight))


def test_each_token_is_rounded_with_a_scale_of_its_own() -> None:
    x = torch.randn(4, 33) * torch.tensor([1e-3, 1.0, 1e3, 0.0])[:, None]
    values, scale = quantise_tokens(x)
    assert bool((values[:3].abs().amax(1) == 127).all())
    assert bool(((values * scale - x).abs() <= 0.5001 * scale).all())
    assert not values[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dynamic_linear_multiplies_the_rounded_input(dtype: torch.dtype) -> None:
    values, scale = quantise_rows(torch.randn(48, 32))
    x = torch.randn(2, 5, 32).to(dtype)
    got = Int8DynamicLinear(values, scale)(x)
    assert (got.shape, got.dtype) == ((2, 5, 48), dtype)
    rounded = dequantise(*quantise_tokens(x.view(10, 32))).view(2, 5, 32)
    want = functional.linear(rounded, dequantise(values, scale))
    torch.testing.assert_close(got.float(), want, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-4)
    plain = functional.linear(x.float(), dequantise(values, scale))
    assert (want - plain).norm() > 1e-3 * plain.norm(), "activations are really rounded"


def test_a_dynamic_linear_takes_no_row_at_all() -> None:
    assert Int8DynamicLinear(*quantise_rows(torch.randn(8, 4)))(torch.empty(0, 4)).shape == (0, 8)
