"""Rounding to 4 bits with compensation: outputs matter, not weights."""

from __future__ import annotations

import pytest
import torch

from deepspec.errors import DeepSpecError
from deepspec.export.gptq import input_products, round_compensated
from deepspec.export.package import native_package
from deepspec.export.quantise import quantise_groups
from deepspec.export.rounding import rounding_problems
from deepspec.export.run import four_bit
from deepspec.inference.assemble import assemble
from deepspec.nn.int4 import dequantise_int4
from tests.unit.export.tiny import make_drafter, make_samples, make_target

NAME = "layers.0.mlp.up_proj.weight"


def inputs(correlated: bool) -> torch.Tensor:
    """Return [4096, 128] inputs; correlated ones live near a space of 16 directions."""
    if not correlated:
        return torch.randn(4096, 128)
    return torch.randn(4096, 16) @ torch.randn(16, 128) + 0.1 * torch.randn(4096, 128)


def off(x: torch.Tensor, weight: torch.Tensor, rounded: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return how far the outputs are from those of ``weight``, relative."""
    want = x @ weight.T
    return float((x @ dequantise_int4(*rounded).T - want).norm() / want.norm())


@pytest.mark.parametrize("group", [32, 128])
def test_outputs_come_closer_where_inputs_are_correlated(group: int) -> None:
    weight, x = torch.randn(64, 128), inputs(correlated=True)
    plain, compensated = quantise_groups(NAME, weight, group), round_compensated(NAME, weight, x.T @ x, group)
    assert compensated[0].shape == (64, 64) and compensated[1].shape == (64, 128 // group)
    assert off(x, weight, compensated) < 0.5 * off(x, weight, plain)


def test_independent_inputs_leave_nothing_to_compensate() -> None:
    weight = torch.randn(64, 128)
    plain, compensated = quantise_groups(NAME, weight, 32), round_compensated(NAME, weight, 5 * torch.eye(128), 32)
    assert plain[0].equal(compensated[0]) and plain[1].equal(compensated[1])


def test_inputs_that_were_never_seen_and_columns_of_zeros() -> None:
    weight = torch.randn(8, 64)
    weight[:, 3] = 0.0
    for products in (torch.zeros(64, 64), torch.diag(torch.arange(64.0) % 2)):
        packed, scale = round_compensated(NAME, weight, products, 32)
        back = dequantise_int4(packed, scale)
        assert bool(torch.isfinite(back).all()) and not back[:, 3].any()


def test_an_input_that_is_not_finite_is_named() -> None:
    with pytest.raises(DeepSpecError, match="an input of layers.0.mlp.up_proj.weight is not finite"):
        round_compensated(NAME, torch.randn(4, 32), torch.full((32, 32), torch.inf), 32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    target = make_target()
    drafter, _ = make_drafter(target)
    drafter.get_parameter("layers.1.mlp.down_proj.weight").data[0, 0] = value
    with pytest.raises(DeepSpecError, match="layers.1.mlp.down_proj.weight holds values that are not finite"):
        input_products(drafter, target, make_samples(2), [NAME])


def test_a_package_of_compensated_matrices_loads_and_is_close() -> None:
    target = make_target(hidden=32, intermediate_size=64)
    drafter, config = make_drafter(target)
    names = four_bit(drafter, "int4_mlp")
    assert len(names) == 3 * 2 and not four_bit(drafter, "fp16_int8")
    products = input_products(drafter, target, make_samples(4), names)
    made, tensors = native_package(drafter, config, target.info, "int4_mlp", products=products)
    plain = native_package(drafter, config, target.info, "int4_mlp")[1]
    assert [name for name in names if tensors[name].equal(plain[name])] == []
    assert {n for n in tensors if not tensors[n].equal(plain[n])} <= {*names, *(f"{n}_scale" for n in names)}
    packaged = assemble(made, config, tensors, target.head, dtype=torch.float32)
    assert list(rounding_problems(drafter.state_dict(), packaged.state_dict(), made)) == []
    again = input_products(drafter, target, make_samples(4), names)
    assert all(again[name].equal(products[name]) for name in names)  # the same package on every machine
