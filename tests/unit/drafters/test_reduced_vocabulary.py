"""A drafter that can propose some of the target's tokens only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.drafters.files import load_drafter, save_drafter
from deepspec.errors import ConfigError
from deepspec.inference.sampling import Sampler, SamplerSettings
from deepspec.nn.packed import PackedHead, pack_head
from tests.unit.drafters.small import TAPS, VOCAB, WIDTH, draft_logits, drafter, greedy, only, row, target_info

SIZE = 30
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:SIZE].sort().values


def reduced(ids: torch.Tensor = IDS, **over: Any) -> DSparkDrafter:
    """Return the whole drafter with the rows ``ids`` of its head and of W2 alone."""
    whole, made = drafter(**over), drafter(draft_vocab_size=len(ids), **over)
    weights = {n: w[ids] if n == "markov_head.markov_w2.weight" else w for n, w in whole.state_dict().items()}
    made.load_state_dict(weights, strict=False)
    made.bind(whole.head)
    made.set_vocabulary(ids)
    return made


def test_the_logits_are_the_whole_drafters_at_the_ids() -> None:
    whole, made = drafter(), reduced()
    batch, features = row(20, [3, 9])
    hidden, want = features.hidden, draft_logits(whole, batch, features.hidden)[..., IDS]
    states = made.block_states(batch, hidden)
    assert made.draft_head.weight.shape == (SIZE, WIDTH)
    torch.testing.assert_close(made.draft_head.logits(states), whole.head.logits(states)[..., IDS])
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplerSettings(temperature, seed=1))
        state = made.start(30)
        made.extend(state, only(hidden[0, :3]))
        found = made.propose(state, int(batch.input_ids[0, 3]), 5, sampler)
        assert found.probabilities.shape == (5, VOCAB)
        assert set(found.tokens.tolist()) <= set(IDS.tolist())
        torch.testing.assert_close(found.probabilities.sum(-1), torch.ones(5))
        outside = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, IDS, value=False)
        assert not found.probabilities[:, outside].any()
        if temperature:
            torch.testing.assert_close(found.probabilities[0, IDS], want[0, 0, 0].softmax(-1))
        else:
            assert found.probabilities.gather(1, found.tokens[:, None]).eq(1).all()


def test_all_ids_give_the_numbers_of_the_whole_vocabulary() -> None:
    whole, made = drafter(), reduced(torch.arange(VOCAB))
    batch, features = row(20, [3, 9])
    losses = []
    for model in (whole, made):
        out = model(batch, features)
        out.sums["draft"].backward()
        losses.append((out, [p.grad for p in model.parameters() if p.grad is not None]))
    (ours, gradients), (theirs, others) = losses
    assert ours.sums["draft"].equal(theirs.sums["draft"])
    assert ours.sums["confidence"].equal(theirs.sums["confidence"])
    assert all(a.equal(b) for a, b in zip(gradients, others, strict=True))
    tokens = []
    for model in (whole, made):
        state = model.start(30)
        model.extend(state, only(features.hidden[0, :3]))
        tokens.append(model.propose(state, 5, 5, Sampler(SamplerSettings(0.7, seed=2))).tokens)
    assert tokens[0].equal(tokens[1])


def test_the_vocabulary_is_saved_and_survives_a_cast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = reduced()
    assert made.d2t is not None
    assert (made.d2t + torch.arange(SIZE)).equal(IDS)
    save_drafter(tmp_path, made, made.config, made.target)
    loaded: Any = load_drafter(tmp_path)
    assert loaded.d2t.dtype == torch.int64
    assert loaded.d2t.equal(made.d2t)
    loaded.to(torch.bfloat16)
    loaded.bind(made.head)
    assert loaded.d2t.dtype == torch.int64
    assert loaded.vocabulary.ids.equal(IDS)
    loaded.set_vocabulary(range(SIZE))
    assert loaded.vocabulary.ids.equal(torch.arange(SIZE))
    with caplog.at_level(logging.WARNING):
        loaded.load_state_dict(made.state_dict())
    assert loaded.vocabulary.ids.equal(IDS)
    assert "vocabulary of the saved weights is kept" in caplog.text


def test_a_packed_head_stays_packed() -> None:
    made = reduced()
    before, hidden = made.draft_head, torch.randn(3, WIDTH)
    packed = pack_head(made.head)
    made.bind(packed)
    assert type(made.draft_head) is type(packed)
    assert made.draft_head.embedding is made.head.embedding
    if isinstance(packed, PackedHead):
        torch.testing.assert_close(made.draft_head.logits(hidden), before.logits(hidden))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(29), "29 ids were given for drafter.draft_vocab_size=30"),
        ([*range(1, 30), 0], "token 0 follows 29: ids must rise"),
        ([0, *range(29)], "token 0 follows 0: ids must rise, each once"),
        (range(VOCAB - 29, VOCAB + 1), f"token {VOCAB} is not in 0 .. {VOCAB - 1}"),
        (range(-1, 29), "token -1 is not in"),
    ],
)
def test_ids_that_cannot_be(ids: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter(draft_vocab_size=SIZE).set_vocabulary(list(ids))


def test_what_is_missing_or_impossible_is_said() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size is null"):
        drafter().set_vocabulary([1, 2])
    with pytest.raises(ConfigError, match=rf"draft_vocab_size=98 must be in 2 .. {VOCAB}"):
        DSparkConfig(draft_vocab_size=98).build(target_info(), TAPS, 1)
    assert "draft_vocab_size=1 leaves nothing to choose" in DSparkConfig(draft_vocab_size=1).problems()[0]
    made = drafter(draft_vocab_size=SIZE)
    with pytest.raises(RuntimeError, match="set_vocabulary"):
        made.propose(made.start(8), 1, 2, greedy)
    assert drafter().vocabulary is None
    assert "d2t" not in drafter().state_dict()
