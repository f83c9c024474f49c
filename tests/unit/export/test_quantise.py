"""Number formats: INT8 rows, 16-bit casts, and what is refused."""

from __future__ import annotations

import pytest
import torch

from deepspec.errors import DeepSpecError
from deepspec.export.quantise import balance, cast, layer_linears, pack, quantise_rows
from deepspec.nn.block import SwiGLU
from deepspec.nn.int8 import Int8Linear, dequantise, int8_kernel_pays
from tests.unit.export.tiny import make_drafter, make_target


def test_rounding_stays_within_half_a_step_of_each_row() -> None:
    weight = torch.randn(7, 33) * torch.logspace(-4, 3, 7)[:, None]
    values, scale = quantise_rows(weight)
    assert values.dtype == torch.int8
    assert scale.shape == (7, 1)
    assert bool(((dequantise(values, scale) - weight).abs() <= 0.5001 * scale).all())
    assert bool((values.abs().amax(1) == 127).all())


def test_a_row_of_zeros_stays_zero() -> None:
    values, scale = quantise_rows(torch.zeros(2, 5))
    assert bool((scale > 0).all())
    assert not dequantise(values, scale).any()


def test_a_unit_with_large_weights_does_not_coarsen_the_others() -> None:
    """Some units say little and weigh much; the outputs stay the same, and INT8 gets them right."""
    torch.manual_seed(0)
    mlp, x = SwiGLU(32, 48), torch.randn(64, 32)
    with torch.no_grad():
        mlp.up_proj.weight[::8] *= 1e-3
        mlp.down_proj.weight[:, ::8] *= 1e3
        mlp.down_proj.weight[:, 3] = 0.0
    want = mlp(x)

    def error() -> float:
        weight = mlp.down_proj.weight.data
        mlp.down_proj.weight.data = dequantise(*quantise_rows(weight))
        off = (mlp(x) - want).norm() / want.norm()
        mlp.down_proj.weight.data = weight
        return off.item()

    before = error()
    balance(mlp)
    torch.testing.assert_close(mlp(x), want, atol=1e-6, rtol=1e-5)
    assert error() < 0.02 < 0.2 < before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_equals_the_multiplied_out_weight(dtype: torch.dtype) -> None:
    values, scale = quantise_rows(torch.randn(48, 32))
    x = torch.randn(2, 5, 32).to(dtype)
    want = torch.nn.functional.linear(x.float(), dequantise(values, scale))
    error = (Int8Linear(values, scale)(x).float() - want).norm() / want.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)  # bf16 keeps 8 bits of the result


def test_the_int8_kernel_is_used_where_it_pays() -> None:
    cpu = torch.device("cpu")
    assert not int8_kernel_pays(cpu, torch.float32)
    assert not int8_kernel_pays(cpu, torch.float16)
    assert not int8_kernel_pays(torch.device("cuda"), torch.bfloat16)


def test_a_weight_of_7e4_is_refused_in_fp16_with_its_name() -> None:
    weights = {"norm.weight": torch.tensor([1.0, 7e4])}
    with pytest.raises(DeepSpecError, match=r"norm\.weight holds 70000.*export\.profile=bf16"):
        pack(weights, "fp16")
    assert pack(weights, "bf16")["norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("int8", [(), ("layers.0.mlp.up_proj.weight",)])
def test_weights_that_are_not_finite_are_refused(value: float, int8: tuple[str, ...]) -> None:
    with pytest.raises(DeepSpecError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        pack({"layers.0.mlp.up_proj.weight": torch.tensor([[1.0, value]])}, "fp16_int8", int8)


def test_cast_keeps_an_empty_tensor() -> None:
    assert cast("x", torch.empty(0, 3), torch.float16).shape == (0, 3)


def test_int8_takes_the_linears_of_the_layers_and_nothing_else() -> None:
    drafter, _ = make_drafter(make_target())
    names = layer_linears(drafter)
    assert len(names) == 2 * 7
    assert all(name.startswith("layers.") and "_proj" in name for name in names)
