from __future__ import annotations

from dataclasses import replace

import torch

from deepspec.contracts import Batch, Features
from deepspec.features.online import RememberingFeatures
from tests.unit.drafters.small import row


class Counting:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, batch: Batch) -> Features:
        self.asked += 1
        hidden = batch.input_ids[..., None].float()
        return Features(hidden, hidden)


def test_remembered_features_are_handed_out_once() -> None:
    source = Counting()
    features = RememberingFeatures(source)
    batch = replace(row(8, [3])[0], sample_ids=("a",))
    first = features.remember(batch)
    assert features(batch) is first
    assert source.asked == 1
    torch.testing.assert_close(features(batch).hidden, first.hidden)
    assert source.asked == 2


def test_other_tokens_under_the_same_name_are_not_mistaken() -> None:
    source = Counting()
    features = RememberingFeatures(source)
    batch = replace(row(8, [3])[0], sample_ids=("a",))
    features.remember(batch)
    other = replace(batch, input_ids=batch.input_ids + 1)
    torch.testing.assert_close(features(other).hidden, other.input_ids[..., None].float())
    wider = replace(row(9, [3])[0], sample_ids=("a",))
    assert features(wider).hidden.shape[1] == 9
