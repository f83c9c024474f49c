"""Two values to a byte: which half holds which column."""

from __future__ import annotations

import torch

from deepspec.nn.int4 import dequantise_int4, pack_int4, unpack_int4


def test_the_low_half_holds_the_even_column() -> None:
    packed = pack_int4(torch.tensor([[-8, 7, 0, -1]], dtype=torch.int8))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0xF0, 0x78]]


def test_every_pair_of_values_comes_back() -> None:
    values = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8).view(16, 32)
    assert unpack_int4(pack_int4(values)).equal(values)


def test_each_group_has_its_scale() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 2)  # [2, 32], groups of 16
    scale = torch.tensor([[1.0, 0.5], [2.0, 4.0]]).half()
    want = values.float().view(2, 2, 16) * scale.float()[..., None]
    assert dequantise_int4(pack_int4(values), scale).equal(want.view(2, 32))
