"""Products with a low-precision head: widened where a CPU would emulate them, in their own precision elsewhere."""

from __future__ import annotations

import pytest
import torch

from deepspec.losses import products


@pytest.mark.parametrize("native", [True, False])
def test_both_ways_agree(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_multiplies", lambda _dtype: native)
    monkeypatch.setattr(products, "TILE", 10)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 16, generator=generator).bfloat16()
    x, grad = torch.randn(5, 16, generator=generator), torch.randn(5, 37, generator=generator)
    logits, back = torch.empty(5, 37), torch.empty(5, 16)
    products.project(x, weight, logits, in_weight_precision=True)
    products.back_project(grad, weight, back, in_weight_precision=True)
    tolerance = 0.05 if native else 1e-5  # bf16 rounds the inputs and the results
    torch.testing.assert_close(logits, x @ weight.float().t(), atol=tolerance * 4, rtol=tolerance)
    torch.testing.assert_close(back, grad @ weight.float(), atol=tolerance * 6, rtol=tolerance)


def test_what_this_cpu_multiplies() -> None:
    assert products.cpu_multiplies(torch.float32)
    for names in products.CPU_FLAGS.values():  # without them every CPU would seem to lack such products
        assert all(isinstance(getattr(torch.cpu, name)(), bool) for name in names)
    assert products.cpu_multiplies(torch.bfloat16) == any(
        getattr(torch.cpu, name)() for name in products.CPU_FLAGS[torch.bfloat16]
    )
