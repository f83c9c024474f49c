"""Sizes by part, on the shape of the quickstart."""

from __future__ import annotations

import torch

from deepspec.contracts import TargetInfo
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.export.quantise import layer_linears, pack
from deepspec.export.sizes import LINEARS, part_sizes, size_rows, total

QUICKSTART = TargetInfo(
    name="quickstart",
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
)


def test_int8_halves_the_linears_of_the_layers() -> None:
    drafter = DSparkConfig(num_layers=2, gamma=5, markov_rank=32).build(QUICKSTART, (1, 8, 14, 20, 27), 0)
    weights = drafter.state_dict()
    sizes = part_sizes(weights, pack(weights, "fp16_int8", layer_linears(drafter)))
    linears = next(size for size in sizes if size.part == LINEARS)
    assert 0.49 < 1 - linears.after / linears.before < 0.5  # the scales are the rest
    assert all(size.before == size.after for size in sizes if size.part != LINEARS)
    whole = total(sizes)
    assert whole.parameters == sum(t.numel() for t in weights.values())
    assert whole.before == 2 * whole.parameters


def test_a_16_bit_package_saves_nothing_of_its_own() -> None:
    weights = {"fc.weight": torch.ones(4, 4), "layers.0.input_layernorm.weight": torch.ones(4), "gate": torch.ones(2)}
    sizes = part_sizes(weights, pack(weights, "bf16"))
    assert [(s.part, s.before, s.after) for s in sizes] == [
        ("norms", 8, 8),
        ("fusion (fc)", 32, 32),
        ("other", 4, 4),
    ]
    rows = size_rows(sizes, vocab_size=10, hidden_size=4)
    assert rows[-3][-1] == "0.0%"
    assert rows[-1][-1] == f"{1 - 44 / (44 + 160):.1%}"
