"""Packed products equal the plain ones, and are only used where they are exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspec.nn.head import FrozenHead
from deepspec.nn.packed import FEW_ROWS, PackedHead, pack_head, pack_linears, pack_weight, unpack_linears

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this PyTorch has no FBGEMM"
)


def bf16_weight(rows: int = 40, columns: int = 24) -> torch.Tensor:
    return (0.05 * torch.randn(rows, columns)).bfloat16().float()


@pytest.mark.parametrize("shape", [(1, 24), (6, 24), (2, 3, 24), (24,), (FEW_ROWS + 1, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_that_of_fp32(shape: tuple[int, ...], with_bias: bool) -> None:
    weight, bias = bf16_weight(), torch.randn(40) if with_bias else None
    packed = pack_weight(weight, bias)
    assert packed is not None
    x = torch.randn(shape)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(packed.product(x), expected.float(), rtol=1e-5, atol=1e-6)


def test_a_weight_that_fp16_would_round_is_left_alone() -> None:
    weight = bf16_weight()
    weight[3, 4] = 1.0 + 2.0**-20
    assert pack_weight(weight) is None
    assert pack_weight(weight, rounding=True) is not None


@pytest.mark.parametrize("value", [1e5, float("nan")])
def test_a_weight_beyond_fp16_is_never_packed(value: float) -> None:
    weight = bf16_weight()
    weight[0, 0] = value
    assert pack_weight(weight, rounding=True) is None


def test_other_precisions_are_left_alone() -> None:
    assert pack_weight(bf16_weight().bfloat16()) is None


def test_linears_keep_their_state_and_can_be_unpacked() -> None:
    module = nn.Sequential(nn.Linear(24, 40, bias=False), nn.SiLU(), nn.Linear(40, 8))
    x, names = torch.randn(6, 24), list(module.state_dict())
    before = module(x)
    assert pack_linears(module, rounding=True) == 2
    assert list(module.state_dict()) == names
    with torch.no_grad():
        packed = module(x)
    assert not torch.equal(packed, before)
    torch.testing.assert_close(packed, before, rtol=1e-2, atol=1e-3)
    unpack_linears(module)
    assert torch.equal(module(x), before)


def test_gradients_take_the_plain_product() -> None:
    packed = pack_weight(bf16_weight())
    assert packed is not None
    x = torch.randn(2, 24, requires_grad=True)
    packed.product(x).sum().backward()
    assert x.grad is not None


def test_head_keeps_scale_cap_and_tie() -> None:
    weight = bf16_weight()
    head = FrozenHead(weight, weight, logit_scale=0.5, logit_softcap=3.0)
    packed = pack_head(head)
    assert isinstance(packed, PackedHead)
    assert packed.tied
    hidden = torch.randn(3, 24)
    torch.testing.assert_close(packed.logits(hidden), head.logits(hidden), rtol=1e-5, atol=1e-6)
    assert packed.to(dtype=torch.bfloat16).weight.dtype == torch.bfloat16
