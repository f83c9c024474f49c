"""Number formats: INT8 rows, 16-bit casts, and what is refused."""

from __future__ import annotations

import pytest
import torch

from deepspec.errors import ConfigError, DeepSpecError
from deepspec.export.package import native_package
from deepspec.export.quantise import Formats, balance, cast, quantise, quantise_groups, quantise_rows
from deepspec.inference.profiles import Profile, plan
from deepspec.nn.block import SwiGLU
from deepspec.nn.int4 import dequantise_int4, unpack_int4
from deepspec.nn.int8 import dequantise
from tests.unit.export.tiny import make_drafter, make_target

UP = "layers.0.mlp.up_proj.weight"


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


def test_a_large_weight_coarsens_its_own_group_alone() -> None:
    """A fitted fusion is nearly diagonal: with one scale a row, the ones would decide how fine everything else is."""
    weight = torch.eye(96) + 0.01 * torch.randn(96, 96)
    group = plan({"fusion": ("fc.weight",)}, "fp16_int8_full")["fusion"]
    values, scale = quantise("fc.weight", weight, group)
    assert (values.shape, values.dtype, scale.shape) == ((96, 96), torch.int8, (96, 3))
    off = (group.weight(values, scale) - weight).abs().unflatten(1, (3, 32))
    assert bool((off <= 0.5001 * scale[..., None]).all())
    rows = (dequantise(*quantise_rows(weight)) - weight).norm()
    assert off.norm() < 0.65 * rows


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


def rows_of(kind: str) -> torch.Tensor:
    """Return rows [64, 1280] with light or heavy tails."""
    if kind == "normal":
        return torch.randn(64, 1280)
    return torch.distributions.StudentT(torch.tensor(3.0)).sample((64, 1280))


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed"])
@pytest.mark.parametrize("group", [32, 128])
def test_no_group_of_4_bits_is_worse_than_rounding_to_nearest(kind: str, group: int) -> None:
    weight = rows_of(kind)
    packed, scale = quantise_groups("w", weight, group)
    assert packed.shape == (64, 640)
    assert (scale.shape, scale.dtype) == ((64, 1280 // group), torch.float16)
    rows = weight.unflatten(1, (-1, group))
    plain = (rows.abs().amax(-1, keepdim=True) / 7).half().float()
    nearest = ((rows / plain).round().clamp(-7, 7) * plain - rows).square().sum(-1)
    searched = (dequantise_int4(packed, scale) - weight).unflatten(1, (-1, group)).square().sum(-1)
    assert bool((searched <= nearest).all())
    ratio = (searched.sum() / nearest.sum()).sqrt()
    assert ratio < 0.95, "the search lowers the error by several percent"
    values = unpack_int4(packed)
    assert int(values.min()) == -8, "all sixteen numbers are used"
    assert int(values.max()) == 7


def test_groups_of_zeros_and_of_tiny_values_stay_near_zero() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 40] = 1e-9
    packed, scale = quantise_groups("w", weight, 32)
    assert bool((scale > 0).all())
    assert dequantise_int4(packed, scale).abs().max() <= 1e-9


def test_a_scale_of_4_bits_beyond_fp16_is_refused_by_name() -> None:
    with pytest.raises(DeepSpecError, match=r"tensor w holds 500000, whose 4-bit scale.*export\.profile=fp16_int8"):
        quantise_groups("w", torch.full((1, 32), 5e5), 32)


def packed(
    profile: Profile, name: str, value: float, formats: Formats | None = None, **over: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of a package whose drafter holds ``value`` once in tensor ``name``."""
    target = make_target(**over)
    drafter, config = make_drafter(target)
    drafter.state_dict()[name].view(-1)[0] = value
    return native_package(drafter, config, target.info, profile, formats=formats)[1]


@pytest.mark.parametrize("profile", ["fp16", "fp16_int8", "fp16_int8_full", "int8_dynamic"])
def test_a_weight_of_7e4_is_refused_in_fp16_with_its_name(profile: Profile) -> None:
    with pytest.raises(DeepSpecError, match=r"norm\.weight holds 70000.*export\.profile=bf16.*export\.overflow=bf16"):
        packed(profile, "norm.weight", 7e4)


def test_bf16_holds_a_weight_of_7e4() -> None:
    assert packed("bf16", "norm.weight", 7e4)["norm.weight"].dtype == torch.bfloat16


def test_a_weight_of_7e4_is_kept_in_bf16_by_flag_and_nothing_else_is() -> None:
    found = packed("fp16_int8", "norm.weight", 7e4, Formats(overflow="bf16"))
    assert [name for name, tensor in found.items() if tensor.dtype == torch.bfloat16] == ["norm.weight"]


def test_int8_holds_a_weight_of_7e4_by_its_scale() -> None:
    values, scale = (packed("fp16_int8", UP, 7e4)[name] for name in (UP, f"{UP}_scale"))
    assert dequantise(values, scale)[0, 0] == pytest.approx(7e4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["norm.weight", UP])
@pytest.mark.parametrize("overflow", ["refuse", "bf16"])
def test_weights_that_are_not_finite_are_refused(value: float, name: str, overflow: str) -> None:
    formats = Formats(overflow="bf16" if overflow == "bf16" else "refuse")
    with pytest.raises(DeepSpecError, match=f"tensor {name} holds values that are not finite"):
        packed("fp16_int8", name, value, formats)


def test_groups_that_do_not_divide_a_width_are_refused_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"down_proj\.weight has 48 columns.*export\.int4_group=32"):
        packed("int4_mlp", "norm.weight", 1.0)
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide"):
        packed("int4_mlp", "norm.weight", 1.0, Formats(int4_group=128), intermediate_size=64)


def test_cast_keeps_an_empty_tensor() -> None:
    assert cast("x", torch.empty(0, 3), torch.float16).shape == (0, 3)
