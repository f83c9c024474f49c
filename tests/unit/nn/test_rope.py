"""Rotary positions against the target family's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from deepspec.errors import TargetError
from deepspec.nn.rope import RotaryEmbedding, rotate

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
RULES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "factor": 2.0},
    LLAMA3,
]


def _own(config: LlamaConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return LlamaRotaryEmbedding(config)(torch.zeros(1), positions)


def _config(**over: Any) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=256, **over)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["rope_type"])
def test_equals_the_target(rule: dict[str, Any]) -> None:
    parameters = rule | {"rope_theta": 1e6}
    positions = torch.tensor([[0, 1, 31, 40, 200]])
    expected = _own(_config(rope_parameters=parameters), positions)
    rope = RotaryEmbedding(parameters, head_dim=16, max_position=256)
    for value, reference in zip(rope(positions), expected, strict=True):
        torch.testing.assert_close(value, reference)


def test_base_and_scaling_survive_the_older_layout() -> None:
    """Older configurations hold rope_theta beside rope_scaling; both layouts give equal cosines and sines."""
    positions = torch.arange(0, 250, 7)[None]
    older = _config(rope_theta=1e6, rope_scaling=LLAMA3)
    parameters = {**older.rope_parameters}  # type: ignore[dict-item]
    rope = RotaryEmbedding(parameters, head_dim=16, max_position=256)
    newer = RotaryEmbedding(LLAMA3 | {"rope_theta": 1e6}, head_dim=16, max_position=256)
    for value, other, reference in zip(rope(positions), newer(positions), _own(older, positions), strict=True):
        torch.testing.assert_close(value, reference)
        torch.testing.assert_close(other, reference)


def test_positions_beyond_any_training_length() -> None:
    rope = RotaryEmbedding({"rope_type": "default", "rope_theta": 10000.0}, head_dim=4, max_position=32)
    cos, sin = rope(torch.tensor([100000]))
    angle = torch.tensor([100000.0, 1000.0])
    torch.testing.assert_close(cos[0], angle.cos().repeat(2))
    torch.testing.assert_close(sin[0], angle.sin().repeat(2))


def test_rotation_is_the_target_familys() -> None:
    rope = RotaryEmbedding({"rope_type": "default", "rope_theta": 10000.0}, head_dim=16, max_position=32)
    cos, sin = rope(torch.arange(6)[None, None])
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
    expected = apply_rotary_pos_emb(q, k, cos[0], sin[0])
    torch.testing.assert_close(rotate(q, cos, sin), expected[0])
    torch.testing.assert_close(rotate(k, cos, sin), expected[1])


def test_partial_rotation_leaves_the_rest() -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    cos, sin = RotaryEmbedding(parameters, head_dim=16, max_position=32)(torch.arange(3))
    x = torch.randn(3, 16)
    turned = rotate(x, cos, sin)
    assert cos.shape == (3, 8)
    torch.testing.assert_close(turned[:, 8:], x[:, 8:])
    torch.testing.assert_close(turned[:, :8], rotate(x[:, :8], cos, sin))


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(TargetError, match="spiral"):
        RotaryEmbedding({"rope_type": "spiral", "rope_theta": 1e4}, head_dim=16, max_position=32)
