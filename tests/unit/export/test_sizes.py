"""Sizes by part, on the shapes of the quickstart and of a published drafter. No tensor of that size is made."""

from __future__ import annotations

import pytest
import torch

from deepspec.contracts import TargetInfo
from deepspec.drafters.base import Drafter
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.registry import drafter_to_dict
from deepspec.export.sizes import LINEARS, PartSize, against, part_sizes, size_rows, total
from deepspec.inference.package_checks import expected_tensors
from deepspec.inference.package_config import make_config
from deepspec.inference.profiles import Int4Group, Profile, QkvStorage, matrices, plan

ROPE = {"rope_type": "default", "rope_theta": 1e5}
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
    rope_parameters=ROPE,
)
QWEN3_4B = TargetInfo(
    name="qwen3-4b",
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=2560,
    num_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    rms_norm_eps=1e-6,
    max_position_embeddings=40960,
    rope_parameters=ROPE,
)
DRAFTERS = {
    "quickstart": (DSparkConfig(num_layers=2, gamma=5, markov_rank=32), QUICKSTART, (1, 8, 14, 20, 27)),
    "qwen3": (DSparkConfig(num_layers=5, gamma=7, markov_rank=256), QWEN3_4B, (1, 9, 17, 25, 33)),
}
MATRIX = QWEN3_4B.vocab_size * QWEN3_4B.hidden_size


def sizes_of(
    name: str, profile: Profile, *, qkv: QkvStorage = "int8", int4_group: Int4Group = 32
) -> tuple[Drafter, list[PartSize]]:
    """Return a drafter without memory and the sizes of its package, counted from what the reader asks for."""
    config, target, taps = DRAFTERS[name]
    with torch.device("meta"):
        drafter = config.build(target, taps, 0)
    written = make_config(
        profile=profile,
        conventions=drafter.conventions,
        target=target,
        drafter=drafter_to_dict(config),
        quantisation=plan(matrices(drafter), profile, qkv=qkv, int4_group=int4_group),
    )
    kinds = expected_tensors(written, config)
    packed = {n: torch.empty(s, dtype=getattr(torch, d), device="meta") for n, (s, d) in kinds.items()}
    return drafter, part_sizes(drafter.state_dict(), packed)


def test_int8_halves_the_linears_of_the_layers() -> None:
    drafter, sizes = sizes_of("quickstart", "fp16_int8")
    linears = next(size for size in sizes if size.part == LINEARS)
    assert 0.49 < linears.saved < 0.5  # the scales are the rest
    assert all(size.before == size.after for size in sizes if size.part != LINEARS)
    whole = total(sizes)
    assert whole.parameters == sum(t.numel() for t in drafter.state_dict().values())
    assert whole.before == 2 * whole.parameters


@pytest.mark.parametrize(
    ("profile", "own", "with_copies"),
    [
        ("fp16", 0.0, 0.55),
        ("fp16_int8", 0.40, 0.72),
        ("int8_dynamic", 0.40, 0.72),
        ("fp16_int8_full", 0.49, 0.77),
        ("int4_mlp", 0.54, 0.79),
    ],
)
def test_each_profile_saves_what_it_promises_on_five_layers_of_qwen3_4b(
    profile: Profile, own: float, with_copies: float
) -> None:
    """Of 615 million own parameters 505 are linears of the layers (374 of them in MLPs), 33 the fusion, 78 Markov."""
    _, sizes = sizes_of("qwen3", profile)
    assert total(sizes).saved >= own
    one, both = (against(sizes, copies, MATRIX) for copies in (1, 2))
    assert one.saved < both.saved
    assert both.saved >= with_copies
    assert both.left_out / both.before == pytest.approx(0.558, abs=1e-3)  # 1556 of 2786 MB are copies


def test_wider_groups_save_a_little_more_and_16_bit_qkv_less() -> None:
    narrow, wide = (total(sizes_of("qwen3", "int4_mlp", int4_group=g)[1]).saved for g in (32, 128))
    assert 0.54 <= narrow < wide < 0.57
    saved, kept = (total(sizes_of("qwen3", "fp16_int8", qkv=q)[1]) for q in ("int8", "16bit"))
    assert kept.after - saved.after == pytest.approx(5 * (4096 + 2 * 1024) * 2560, rel=0.01)


def test_the_table_says_how_much_of_the_saving_is_copies_left_out() -> None:
    weights = {"fc.weight": torch.ones(4, 4), "layers.0.input_layernorm.weight": torch.ones(4), "gate": torch.ones(2)}
    sizes = part_sizes(weights, {name: tensor.half() for name, tensor in weights.items()})
    assert [(s.part, s.before, s.after) for s in sizes] == [
        ("norms", 8, 8),
        ("fusion (fc)", 32, 32),
        ("other", 4, 4),
    ]
    own, one, both = size_rows(sizes, vocab_size=10, hidden_size=4)[-3:]
    assert own[-2:] == ("0.0%", "")
    assert one[-2:] == (f"{1 - 44 / (44 + 80):.1%}", f"{80 / (44 + 80):.1%}")
    assert both[-2:] == (f"{1 - 44 / (44 + 160):.1%}", f"{160 / (44 + 160):.1%}")
