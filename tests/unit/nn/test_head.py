"""The frozen head, and the norm."""

from __future__ import annotations

import torch

from deepspec.nn.head import FrozenHead
from deepspec.nn.norm import RMSNorm
from tests.unit.drafters.small import target_info


def test_scale_cap_and_bias() -> None:
    weight, bias = torch.randn(7, 4), torch.randn(7)
    head = FrozenHead(weight, weight, bias, embed_scale=3.0, logit_scale=0.5, logit_softcap=2.0)
    hidden = torch.randn(5, 4)
    torch.testing.assert_close(head.logits(hidden), torch.tanh(0.5 * (hidden @ weight.t() + bias) / 2.0) * 2.0)
    torch.testing.assert_close(head.embed(torch.tensor([2, 6])), 3.0 * weight[[2, 6]])


def test_tied_weights_stay_one_tensor_and_untied_ones_two() -> None:
    weight = torch.nn.Parameter(torch.randn(97, 32))
    tied = FrozenHead.from_tensors(target_info(), weight, weight)
    assert tied.tied and tied.to(dtype=torch.bfloat16).tied
    assert tied.weight.data_ptr() == weight.data_ptr() and not tied.weight.requires_grad
    untied = FrozenHead.from_tensors(target_info(), weight, torch.randn(97, 32))
    assert not untied.tied and not untied.to(dtype=torch.bfloat16).tied


def test_norm_takes_the_mean_square_in_fp32() -> None:
    norm = RMSNorm(64, eps=1e-6).half()
    out = norm(torch.full((1, 64), 300.0, dtype=torch.float16))  # 300 squared is beyond fp16
    torch.testing.assert_close(out, torch.ones(1, 64, dtype=torch.float16))
