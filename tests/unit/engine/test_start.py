"""What a start from the target shares between ranks, and which batches a fitted one looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspec.contracts import Batch
from deepspec.engine import start
from deepspec.engine.distributed import Ranks
from tests.unit.drafters.small import row


def batches(*lengths: int) -> list[Batch]:
    return [replace(row(length, [3])[0], sample_ids=(f"s{i}",)) for i, length in enumerate(lengths)]


def test_enough_samples_and_no_more() -> None:
    given = batches(8, 8, 8, 8)
    assert [b.sample_ids for b in start._first(iter(given), 3)] == [("s0",), ("s1",), ("s2",)]
    assert len(list(start._first(iter(given), 9))) == 4


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the samples are; the first batch is always taken."""
    monkeypatch.setattr(start, "MAX_POSITIONS", 20)
    assert len(list(start._first(iter(batches(8, 8, 8)), 3))) == 2
    assert len(list(start._first(iter(batches(64, 8)), 2))) == 1


@dataclass(frozen=True)
class ManyRanks(Ranks):
    """Notes on which devices the tensors lie that it is given."""

    devices: list[str] = field(default_factory=list)

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        self.devices.extend(tensor.device.type for tensor in tensors)


class Copied(torch.nn.Linear):
    """A drafter that is started."""

    def initialise_from(self, target_model: object) -> list[str]:  # noqa: ARG002
        return ["copied"]

    def fit(self, examples: object) -> list[str]:  # noqa: ARG002
        return ["fitted"]


@pytest.mark.parametrize("init", ["target", "fitted"])
def test_every_rank_gets_the_first_ones_weights(init: str) -> None:
    """The ranks exchange them where their process group can, on their devices (here one that is no CPU)."""
    ranks = ManyRanks(0, 0, 2, torch.device("meta"))
    config: Any = SimpleNamespace(
        drafter=SimpleNamespace(init=init, fit_samples=1), train=SimpleNamespace(warm_start=None)
    )
    drafter: Any = Copied(2, 2)
    inputs: Any = SimpleNamespace(first_batches=lambda anchors: iter(batches(8)))
    target: Any = SimpleNamespace(model=None)
    features: Any = str  # what the fit is given is not looked at
    start.start_weights(config, drafter, target, inputs, features, ranks)
    assert ranks.devices == ["meta", "meta"]
