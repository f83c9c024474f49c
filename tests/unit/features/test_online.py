from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deepspec.contracts import Batch, Features, Sample
from deepspec.data.collate import Document, collate
from deepspec.engine.base import LossModule
from deepspec.features.online import OnlineFeatures, RememberedFeatures, SummedFeatures
from deepspec.losses.products import whole_sums
from deepspec.nn.head import FrozenHead
from tests.helpers import tiny_target
from tests.unit.drafters.small import drafter, row


class Counting:
    """Says of each token its id, and counts the rows it is asked about."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, batch: Batch) -> Features:
        self.asked += batch.input_ids.shape[0]
        hidden = batch.input_ids[..., None].float()
        return Features(hidden, hidden)


def batch_of(**lengths: int) -> Batch:
    """One row a sample, padded on the right; each sample's tokens begin with a number of its own."""
    samples = [
        Sample(name, tuple(range(ord(name) - 90, ord(name) - 90 + length)), (True,) * length)
        for name, length in lengths.items()
    ]
    return collate([[Document(sample, [1])] for sample in samples])


def test_a_sample_is_computed_once() -> None:
    source = Counting()
    features = RememberedFeatures(source, max_bytes=2**20)
    features(batch_of(a=5, b=8))
    assert source.asked == 2
    again = batch_of(b=8, c=3)
    assert features(again).hidden[..., 0].tolist() == again.input_ids.tolist()  # padding has id 0
    assert source.asked == 3


def test_the_sums_of_a_reduced_vocabulary_are_computed_once_and_change_nothing() -> None:
    model = drafter(draft_vocab_size=40)
    model.set_vocabulary(range(1, 81, 2))
    batch, plain = row(40, [3, 5, 20])
    batch = replace(batch, sample_ids=("a",))
    asked = []

    def source(batch: Batch) -> Features:
        asked.append(batch)
        return plain

    features = RememberedFeatures(SummedFeatures(source, model.head), max_bytes=2**20)
    trained = LossModule(model, compute=torch.float32)
    for _ in range(2):
        found = features(batch)
        assert found.log_sum is not None
        expected, got = model(batch, plain), trained(batch, found)
        torch.testing.assert_close(got.sums, expected.sums, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.metrics["top1"], expected.metrics["top1"])
        other = trained(batch, replace(found, log_sum=found.log_sum + 1.0))
        assert abs(other.sums["draft"] - expected.sums["draft"]) > 1e-2, "the sums are not used"
    assert len(asked) == 1
    model.loss_precision = "bf16_logits"  # rounded logits have other sums
    torch.testing.assert_close(trained(batch, found).sums, model(batch, plain).sums, rtol=0, atol=0)


def test_sums_are_not_rounded_to_the_precision_of_the_head() -> None:
    """bf16 logits near 20 are 0.125 apart, which would make probabilities wrong by 6 %."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(97, 32, generator=generator).bfloat16()
    head = FrozenHead(embedding=weight, weight=weight)
    states = (3.0 * torch.randn(50, 32, generator=generator)).bfloat16()
    sums, top = whole_sums(states, head)
    logits = states.double() @ weight.double().t()
    assert logits.amax() > 30
    torch.testing.assert_close(sums.double(), logits.logsumexp(-1), rtol=0.0, atol=1e-4)
    assert top.equal(logits.argmax(-1))


def test_what_finds_no_room_is_computed_again() -> None:
    source = Counting()
    features = RememberedFeatures(source, max_bytes=5 * 2 * 4)
    for _ in range(2):
        features(batch_of(a=5, b=8))
    assert source.asked == 3


def test_other_tokens_under_the_same_name_are_not_mistaken() -> None:
    features = RememberedFeatures(Counting(), max_bytes=2**20)
    features(batch_of(a=5))
    batch = batch_of(a=5)
    other = replace(batch, input_ids=batch.input_ids + 1)
    assert features(other).hidden[0, :5, 0].tolist() == other.input_ids[0, :5].tolist()
    longer = batch_of(a=6)
    assert features(longer).hidden[0, :6, 0].tolist() == longer.input_ids[0, :6].tolist()


def test_the_same_bits_whatever_batch_a_sample_comes_in() -> None:
    target = tiny_target("llama")

    def said(*batches: Batch) -> torch.Tensor:
        features = RememberedFeatures(OnlineFeatures(target, (0, 1)), max_bytes=2**30)
        found = [features(batch) for batch in batches][-1]
        return torch.cat((found.hidden, found.last_hidden), -1)[0, :5]

    assert said(batch_of(a=5, b=30)).equal(said(batch_of(a=5)))
    assert said(batch_of(a=5, b=30)).equal(said(batch_of(b=30, a=5), batch_of(a=5, c=7)))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_head_on_remembered_states_gives_the_targets_logits(family: str) -> None:
    """Remembered states are those after the final norm, whose weight is not 1 in these targets."""
    target = tiny_target(family)
    features = RememberedFeatures(OnlineFeatures(target, (0, 4)), max_bytes=2**30)
    features(batch_of(a=5, b=30))
    batch = batch_of(b=30, a=5)
    found = features(batch)  # out of memory alone
    own = target.model(input_ids=batch.input_ids, output_hidden_states=True, use_cache=False)
    taps = torch.cat((own.hidden_states[1], own.hidden_states[5]), -1)
    logits = target.head.logits(found.last_hidden)
    for index, length in ((0, 30), (1, 5)):
        torch.testing.assert_close(logits[index, :length], own.logits[index, :length], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.hidden[index, :length], taps[index, :length], rtol=1e-4, atol=1e-5)


def test_samples_of_a_packed_row_are_remembered_one_by_one() -> None:
    target = tiny_target("llama")
    samples = [Sample(name, tuple(range(i, 2 * i)), (True,) * i) for name, i in (("a", 9), ("b", 11), ("c", 14))]
    documents = [Document(sample, [1]) for sample in samples]
    source = OnlineFeatures(target, (0, 1))
    features = RememberedFeatures(source, max_bytes=2**30)
    rows, packed = collate([[document] for document in documents]), collate([documents[::-1], []])
    alone, found = features(rows), features(packed)
    start = 0
    for place in (2, 1, 0):
        length = len(samples[place].input_ids)
        assert found.hidden[0, start : start + length].equal(alone.hidden[place, :length])
        assert found.last_hidden[0, start : start + length].equal(alone.last_hidden[place, :length])
        start += length
    assert not found.hidden[0, start:].any()
    assert not found.hidden[1].any()
    online = target.features(packed, (0, 1))
    torch.testing.assert_close(online.hidden[0, :start], found.hidden[0, :start], rtol=1e-4, atol=1e-5)
