"""A drafter started from its target's last layers computes what those layers compute."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn

from deepspec.drafters.base import Drafter
from deepspec.drafters.blocks.initialise import norm_weight
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.errors import ConfigError
from tests.unit.drafters.small import TAPS, VOCAB, target_info

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Phi3": {"pad_token_id": 0},
    "Gemma2": {"query_pre_attn_scalar": 4},
    "Gemma3Text": {"query_pre_attn_scalar": 4},
    "Olmo2": {},
    "Granite": {"attention_multiplier": 0.5, "residual_multiplier": 0.3},
    "Cohere": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def _target(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        **FAMILIES[family],
    )
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _started(family: str) -> tuple[nn.Module, DSparkDrafter, list[str]]:
    model = _target(family)
    drafter = DSparkConfig(num_layers=2, gamma=5, markov_rank=8).build(target_info(), TAPS, VOCAB - 1)
    return model, drafter, drafter.initialise_from(model)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_starts_finite_and_says_what_it_took(family: str) -> None:
    _, drafter, lines = _started(family)
    assert [line.split()[0] for line in lines] == ["layers.0", "layers.1", "norm", "fc"]
    assert all(bool(torch.isfinite(p).all()) for p in drafter.parameters())
    assert drafter.markov_head is not None and not drafter.markov_head.markov_w2.weight.any()


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (1, "fc passes layer 4 on"),
        (2, "fc passes layer 4 on, for the layers behind layers.0"),
        (
            3,
            "fc passes layer 4 on (better for the layers behind layers.0: 3, "
            "which is not among target.target_layer_ids)",
        ),
        (4, "fc passes layer 2 on, for the layers behind layers.0"),
    ],
)
def test_the_context_is_what_the_copies_read(layers: int, said: str) -> None:
    drafter = DSparkConfig(num_layers=layers, gamma=5, markov_rank=8).build(target_info(), TAPS, VOCAB - 1)
    assert drafter.initialise_from(_target("Llama"))[-1] == said
    place = TAPS.index(int(said.split()[3]))
    taps = torch.randn(1, 3, len(TAPS), 32)
    torch.testing.assert_close(drafter.fc(taps.flatten(2)), taps[..., place, :])


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma2", "Gemma3Text", "Granite"])
def test_values_and_mlp_are_the_targets(family: str) -> None:
    model, drafter, _ = _started(family)
    x = torch.randn(1, 9, 32) * 3.0
    features = torch.cat((torch.randn(1, 9, 64), x), dim=-1)  # the last tap is x
    for ours, theirs in zip(drafter.decoder_layers, model.model.layers[-2:], strict=True):  # type: ignore[index, union-attr]
        attention = theirs.self_attn
        normed = theirs.input_layernorm(x)
        if family == "Phi3":
            values = attention.qkv_proj(normed)[..., -16:]
        else:
            values = attention.v_proj(normed) - (0 if attention.v_proj.bias is None else attention.v_proj.bias)
        torch.testing.assert_close(ours.self_attn.v_proj(drafter.context(features)), values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.self_attn.v_proj(ours.input_layernorm(x)), values, atol=1e-4, rtol=1e-4)
        if not family.startswith("Gemma"):
            factor = getattr(theirs, "residual_multiplier", 1.0)
            expected = theirs.mlp(theirs.post_attention_layernorm(x)) * factor
            torch.testing.assert_close(ours.mlp(ours.post_attention_layernorm(x)), expected, atol=1e-4, rtol=1e-4)


def test_queries_and_keys_of_a_target_with_head_norms_are_the_same() -> None:
    model, drafter, _ = _started("Qwen3")
    x = torch.randn(1, 9, 32)
    ours, theirs = drafter.decoder_layers[1].self_attn, model.model.layers[-1].self_attn  # type: ignore[index, union-attr]
    normed = model.model.layers[-1].input_layernorm(x)  # type: ignore[index, union-attr]
    still = (torch.ones(9, 8), torch.zeros(9, 8))
    expected = theirs.q_norm(theirs.q_proj(normed).view(1, 9, 4, 8)).transpose(1, 2)
    mine = ours.queries(drafter.decoder_layers[1].input_layernorm(x), still)
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Phi3", "Granite"])
def test_queries_and_keys_keep_the_targets_scale(family: str) -> None:
    """Without head norms in the target, attention keeps its size, up to the differences between heads."""
    model, drafter, _ = _started(family)
    still = (torch.ones(200, 8), torch.zeros(200, 8))
    layer, source = drafter.decoder_layers[1], cast("Any", model.get_submodule("model.layers.5"))
    seen: list[torch.Tensor] = []
    source.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=torch.randint(0, VOCAB, (1, 200)))
    x = seen[0]
    normed, theirs = source.input_layernorm(x), source.self_attn
    if family == "Phi3":
        query, key, _ = theirs.qkv_proj(normed).split((32, 16, 16), dim=-1)
    else:
        query, key = theirs.q_proj(normed), theirs.k_proj(normed)
    query = query.view(200, 4, 8).transpose(0, 1)
    key = key.view(200, 2, 8).transpose(0, 1).repeat_interleave(2, 0)
    expected = (query @ key.transpose(1, 2) * theirs.scaling).std()
    mine_q = layer.self_attn.queries(layer.input_layernorm(x), still)[0]
    mine_k = layer.self_attn.keys_values(layer.input_layernorm(x), still)[0][0].repeat_interleave(2, 0)
    assert (mine_q @ mine_k.transpose(1, 2) * 8**-0.5).std().item() == pytest.approx(expected.item(), rel=0.5)


def test_norms_are_read_by_what_they_do() -> None:
    gemma = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(8)
    with torch.no_grad():
        gemma.weight.copy_(torch.arange(8.0))
    found = norm_weight(gemma, 8)
    assert found is not None
    torch.testing.assert_close(found, 1.0 + torch.arange(8.0), atol=1e-4, rtol=1e-4)
    assert norm_weight(gemma, 16) is None
    assert norm_weight(None, 8) is None


def test_what_does_not_fit_is_said() -> None:
    assert "biases dropped" in _started("Qwen2")[2][0]
    assert "MLP stays random" in _started("Qwen3Moe")[2][0]
    assert "no input norm" in _started("Olmo2")[2][0]
    assert "norms after attention and MLP have no place" in _started("Gemma2")[2][0]
    drafter = DSparkConfig(num_layers=2).build(target_info(), TAPS, VOCAB - 1)
    assert drafter.initialise_from(nn.Linear(2, 2)) == [
        "the target shows no stack of decoder layers that is deep enough: every weight stays random"
    ]


def test_a_drafter_without_such_a_start_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.init: Drafter cannot start from its target"):
        Drafter().initialise_from(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"drafter\.init: Drafter cannot be fitted"):
        Drafter().fit([])
