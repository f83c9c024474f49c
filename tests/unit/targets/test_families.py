"""Every family: what is captured and computed here equals what the model itself says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspec.contracts import Batch
from deepspec.errors import TargetError
from deepspec.targets import families
from deepspec.targets.target import Target
from tests.helpers import FAMILIES, tiny_model, tiny_target

IDS = (-1, 0, 2, 4)
LENGTH = 21  # beyond every sliding window of the tiny models


def batch_of(*rows: list[int], width: int) -> Batch:
    """Rows that hold one or more documents of random tokens, given by their lengths."""
    torch.manual_seed(1)
    segments = [[i for i, n in enumerate(row, 1) for _ in range(n)] for row in rows]
    positions = [[p for n in row for p in range(n)] for row in rows]
    padded = [[line + [0] * (width - len(line)) for line in lines] for lines in (segments, positions)]
    segment_ids, position_ids = (torch.tensor(lines) for lines in padded)
    ids = torch.randint(4, 97, segment_ids.shape) * (segment_ids > 0)
    anchors = torch.zeros(len(rows), 1, dtype=torch.long)
    return Batch(ids, segment_ids, position_ids, segment_ids > 0, anchors, anchors == 0)


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {family: tiny_target(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_head_equal_the_models_own(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    batch = batch_of([LENGTH], [LENGTH], width=LENGTH)
    features = target.features(batch, IDS)
    own = target.model(input_ids=batch.input_ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(target.head.logits(features.last_hidden), own.logits, rtol=1e-5, atol=1e-6)
    for k, hidden in zip(IDS, features.hidden.split(32, dim=-1), strict=True):
        torch.testing.assert_close(hidden, own.hidden_states[k + 1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(target.head.embed(batch.input_ids), own.hidden_states[0], rtol=1e-5, atol=1e-6)
    assert not features.hidden.requires_grad
    assert target.info.vocab_size == 97
    assert set(target.info.rope_parameters) >= {"rope_type", "rope_theta"}


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_segments_change_nothing(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    for rows, width in (([[LENGTH], [5]], LENGTH), ([[9, 1, 11], [7]], LENGTH + 3)):
        batch = batch_of(*rows, width=width)
        features = target.features(batch, IDS)
        for row, lengths in enumerate(rows):
            start = 0
            for n in lengths:
                alone = batch_of([n], width=n)
                alone.input_ids.copy_(batch.input_ids[row, start : start + n])
                expected = target.features(alone, IDS)
                got = features.hidden[row, start : start + n], features.last_hidden[row, start : start + n]
                torch.testing.assert_close(got[0], expected.hidden[0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(got[1], expected.last_hidden[0], rtol=1e-4, atol=1e-4)
                start += n


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_steps_and_crops_equal_the_uncached_forward(targets: dict[str, Target], family: str) -> None:
    target = targets[family]
    batch = batch_of([LENGTH], width=LENGTH)
    expected = target.features(batch, IDS)
    logits = target.head.logits(expected.last_hidden)[0]
    cache = target.new_cache(8)  # shorter than the text: it has to grow
    wrong = torch.full((1, 4), 96)
    start = 0
    for n in (11, 1, 3, 1, 5):
        step = target.step(batch.input_ids[:, start : start + n], cache, IDS)
        torch.testing.assert_close(step.logits, logits[start : start + n], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(step.hidden, expected.hidden[0, start : start + n], rtol=1e-4, atol=1e-4)
        start += n
        target.step(wrong, cache, IDS)  # a rejected draft
        target.crop(cache, start)
    assert cache.length == LENGTH


def test_logits_of_the_last_tokens_only() -> None:
    target = tiny_target(layers=2)
    ids = torch.arange(4, 12)[None]
    every = target.step(ids, target.new_cache(8))
    last = target.step(ids, target.new_cache(8), num_logits=2)
    assert last.logits.dtype == torch.float32
    assert every.hidden.shape == (8, 0)
    torch.testing.assert_close(last.logits, every.logits[-2:])


class Constant(nn.Module):
    """A decoder layer whose output is its own number everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.full_like(hidden_states, self.value)


def test_layer_k_is_the_output_of_layer_k() -> None:
    model = tiny_model(layers=4)
    for k in range(4):
        model.model.layers[k] = Constant(float(k))
    target = Target(model)
    features = target.features(batch_of([5], width=5), (0, 1, 3))
    assert features.hidden[0, 0].view(3, 32).unique(dim=1).squeeze(1).tolist() == [0.0, 1.0, 3.0]
    with pytest.raises(TargetError, match="4 layers"):
        target.features(batch_of([5], width=5), (4,))


def test_state_before_the_final_norm_is_not_taken_for_last_hidden() -> None:
    target = tiny_target(layers=3)
    batch = batch_of([9], width=9)
    features = target.features(batch, (2,))
    logits = target.model(input_ids=batch.input_ids).logits
    assert (target.head.logits(features.hidden) - logits).abs().max() > 0.1  # the norm's weight is not 1
    torch.testing.assert_close(target.head.logits(features.last_hidden), logits)


def test_target_is_frozen_and_shares_its_weights() -> None:
    target = tiny_target(layers=2, tie_word_embeddings=True)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training
    assert target.head.tied
    assert target.head.embedding.data_ptr() == target.model.model.embed_tokens.weight.data_ptr()
    untied = tiny_target(layers=2)
    assert not untied.head.tied


def test_features_can_be_used_under_autograd() -> None:
    target = tiny_target(layers=2)
    features = target.features(batch_of([5], width=5), (0,))
    weight = torch.ones(32, requires_grad=True)
    (features.hidden * weight).sum().backward()
    assert weight.grad is not None


def test_unknown_family_works_when_the_common_names_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(families.FAMILIES)
    del known["llama"], known["granite"]
    for module in (families, __import__("deepspec.targets.target", fromlist=["FAMILIES"])):
        monkeypatch.setattr(module, "FAMILIES", known)
    assert Target(tiny_model("llama", layers=2)).info.model_type == "llama"
    with pytest.raises(TargetError, match="'granite'.*scaled"):
        Target(tiny_model("granite", layers=2))


def test_model_with_other_names_is_refused_by_family() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(TargetError, match="'gpt2'.*Known families"):
        Target(model)


def test_fingerprint_tells_weights_apart_and_survives_precision() -> None:
    first, same, other = (tiny_target(layers=2, seed=seed).info.fingerprint for seed in (0, 0, 1))
    assert first == same != other
    assert Target(tiny_model(layers=2).bfloat16()).info.fingerprint == first
