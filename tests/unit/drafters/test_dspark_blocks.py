"""What a block may depend on, and that training and decoding draft alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from deepspec.contracts import Features
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.drafters.objective import slot_mask
from deepspec.errors import ConfigError, DeepSpecError
from deepspec.nn.masks import block_mask
from tests.unit.drafters.small import (
    Forced,
    draft_logits,
    drafter,
    greedy,
    known,
    only,
    packed,
    padded,
    row,
    stacked,
    target_info,
)

WINDOWS = [None, 4, 9, 200]


@pytest.mark.parametrize("window", WINDOWS)
def test_training_and_decoding_draft_alike(window: int | None) -> None:
    model = drafter(sliding_window=window)
    batch, features = row(40, [3, 5, 20, 34])
    expected = draft_logits(model, batch, features.hidden)[0]
    for block, anchor in enumerate([3, 5, 20, 34]):
        tokens = batch.input_ids[0, anchor : anchor + 6].tolist()
        sampler, state = Forced(tokens[1:]), model.start(40)
        model.extend(state, known(batch, features, 0, anchor // 2))
        model.extend(state, known(batch, features, anchor // 2, anchor))
        proposal = model.propose(state, tokens[0], 5, sampler)
        torch.testing.assert_close(torch.stack(sampler.logits), expected[block], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(proposal.probabilities, expected[block].softmax(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("asked", [0, 6])
def test_more_tokens_than_trained_for_are_refused(asked: int) -> None:
    model = drafter()
    with pytest.raises(ConfigError, match="evaluate.gamma"):
        model.propose(model.start(8), 1, asked, greedy)


def test_a_full_state_is_refused() -> None:
    model = drafter()
    state = model.start(8)
    with pytest.raises(ConfigError, match="9 positions"):
        model.extend(state, only(torch.randn(9, 96)))


def test_overflow_is_refused_when_proposing_and_visible_in_training() -> None:
    model = drafter().half()
    model.bind(model.head.to(dtype=torch.float16))
    batch, features = row(12, [3])
    hidden = features.hidden.half()
    hidden[0, 1, 0] = 7e4  # infinite in fp16
    state = model.start(12)
    model.extend(state, only(hidden[0, :5]))
    with pytest.raises(DeepSpecError, match="not finite"):
        model.propose(state, 1, 5, greedy)
    out = model(batch, Features(hidden, features.last_hidden.half()))
    assert not torch.isfinite(out.sums["draft"])


@pytest.mark.parametrize("window", WINDOWS)
def test_a_block_does_not_see_its_future(window: int | None) -> None:
    """Two anchors closer than a block: whatever comes after the first anchor is nothing to its block."""
    model = drafter(sliding_window=window)
    batch, features = row(30, [10, 12])
    before = model.block_states(batch, features.hidden)
    ids, hidden = batch.input_ids.clone(), features.hidden.clone()
    ids[:, 11:] = 7
    hidden[:, 10:] = torch.randn_like(hidden[:, 10:])
    after = model.block_states(replace(batch, input_ids=ids), hidden)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert (after[:, 1] - before[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("window", [None, 6])
def test_every_back_end_gives_the_same_loss_and_gradients(window: int | None) -> None:
    """A row of 5 tokens beside one of 500, with padding behind both and padding anchors: slots that see nothing."""
    short, long = row(5, [2], seed=1), row(500, [3, 250, 494], seed=2)
    batch, features = stacked(padded(short, 510, 4), padded(long, 510, 4))
    assert not block_mask(batch, 5, window).any(-1).all()
    model = drafter(sliding_window=window)
    found: dict[str, tuple[dict[str, float], torch.Tensor]] = {}
    for backend in ("sdpa", "eager"):
        model.attention_backend = backend
        model.zero_grad()
        sums = model(batch, features).sums
        torch.stack(list(sums.values())).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[backend] = {name: value.item() for name, value in sums.items()}, gradients
    (sums, gradients), (expected, reference) = found["sdpa"], found["eager"]
    assert all(math.isfinite(value) and value > 0 for value in expected.values())
    assert reference.isfinite().all()
    assert sums == pytest.approx(expected, rel=1e-5)
    assert (gradients - reference).norm() <= 1e-5 * reference.norm()


def test_slots_end_with_the_turn_and_with_the_document() -> None:
    first, second = row(10, [6], seed=1), row(12, [3], seed=2, supervised_from=0)
    batch, _ = packed(first, second)
    mask = batch.loss_mask.clone()
    mask[0, 15] = False  # token 5 of the second document
    counted = slot_mask(replace(batch, loss_mask=mask), 5)
    assert counted[0].tolist() == [[True, True, True, False, False], [True, False, False, False, False]]


def _turned(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn heads [H, n, Dh], channels i and i + Dh/2 as one complex number, by positions [n] times theta^(-2i/Dh)."""
    low, high = heads.chunk(2, dim=-1)
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(low.shape[-1]).double() / low.shape[-1])
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _at_positions(model: DSparkDrafter, hidden: torch.Tensor, anchor: int, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits [K, V] of a block behind ``hidden`` [t, C*D]; both sit at the ``positions`` [t+K] given."""
    context, x = model.context(hidden), model.block_inputs(torch.tensor(anchor))
    for layer in model.decoder_layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat((context, normed))
        q = attention.q_norm(attention.q_proj(normed).view(-1, 4, 8)).transpose(0, 1)
        k = attention.k_norm(attention.k_proj(both).view(-1, 2, 8)).transpose(0, 1)
        v = attention.v_proj(both).view(-1, 2, 8).transpose(0, 1)
        q, k = _turned(q, positions[len(hidden) :]), _turned(k, positions)
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / 8**0.5
        mixed = scores.softmax(-1) @ v.repeat_interleave(2, 0)
        x = x + attention.o_proj(mixed.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.head.logits(model.norm(x))


@pytest.mark.parametrize(("anchor", "tolerance"), [(40, 1e-5), (4000, 2e-3)])  # angles are fp32
def test_drafting_far_beyond_the_training_length(anchor: int, tolerance: float) -> None:
    """A drafter for 32 positions drafts at 40 and at 4000 as if every position were written out."""
    info = target_info(max_position_embeddings=32)
    model = drafter(info=info, markov_head="none", confidence_head=False).double()
    model.bind(model.head.to(dtype=torch.float64))
    batch, features = row(anchor + 8, [anchor])
    hidden, token = features.hidden.double(), int(batch.input_ids[0, anchor])
    positions = torch.arange(anchor + 5)
    expected = _at_positions(model, hidden[0, :anchor], token, positions)
    sampler, state = Forced([1] * 5), model.start(anchor)
    model.extend(state, only(hidden[0, :anchor]))
    model.propose(state, token, 5, sampler)
    torch.testing.assert_close(torch.stack(sampler.logits).double(), expected, atol=tolerance, rtol=tolerance)
    trained = draft_logits(model, batch, hidden)[0, 0]
    torch.testing.assert_close(trained, expected, atol=tolerance, rtol=tolerance)
    capped = _at_positions(model, hidden[0, :anchor], token, positions.clamp(max=31))
    assert (capped - expected).abs().max() > 20 * tolerance, "the positions do not matter here"


def test_conventions_are_all_said() -> None:
    said = drafter(sliding_window=8).conventions
    assert (said.block_layout, said.gamma, said.target_layer_ids) == ("anchor_first", 5, (0, 2, 4))
    assert (said.mask_token_id, said.sliding_window, said.is_causal) == (96, 8, False)
