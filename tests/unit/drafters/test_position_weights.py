"""How slots weigh in the loss of block drafters: by decay, alike, or by D-PACE."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deepspec.contracts import Batch, Features
from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.registry import drafter_from_dict, drafter_to_dict
from deepspec.engine.loop import normalised_loss
from deepspec.errors import ConfigError
from deepspec.losses import rows
from tests.unit.drafters.small import dflash, draft_logits, drafter, packed, padded, row, stacked

ALPHA = 0.3
FIRST, SECOND = row(17, [3, 6, 14, 16], seed=1), row(33, [4, 27], seed=2)
"""The block at 14 is cut short by the end of its document; the one at 16 has no slot at all."""


def gradient(model: Any, cases: list[tuple[Batch, Features]]) -> torch.Tensor:
    """Return the gradient of an optimiser step whose micro-batches are ``cases``."""
    model.zero_grad()
    weights = [model.denominators(batch) for batch, _ in cases]
    totals = {name: torch.stack([w[name] for w in weights]).sum() for name in weights[0]}
    for batch, features in cases:
        normalised_loss(model(batch, features).sums, model.coefficients, totals).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def obvious(model: Any, batch: Batch, features: Features) -> torch.Tensor:
    """The draft's loss with D-PACE's weights, slot after slot and block after block, divided by the blocks."""
    logits, gamma = draft_logits(model, batch, features.hidden), model.conventions.gamma
    total, blocks = torch.zeros(()), 0
    for index, anchor in enumerate(batch.anchor_indices[0].tolist()):
        slots = min(gamma, batch.input_ids.shape[1] - 1 - anchor)
        z, labels = logits[0, index, :slots], batch.input_ids[0, anchor + 1 : anchor + 1 + slots]
        t = model.head.logits(features.last_hidden[0, anchor : anchor + slots])
        ce = rows.cross_entropy(z, labels)
        smoothed = [(1.0 - ALPHA) * math.exp(-value) + ALPHA for value in ce.tolist()]
        reach = [math.prod(smoothed[: m + 1]) for m in range(slots)]
        weight = torch.tensor([sum(reach[j:]) for j in range(slots)])
        total = total + (weight * (model.config.ce * ce + model.config.l1 * rows.l1_distance(z, t))).sum()
        blocks += slots > 0
    return total / blocks


@pytest.mark.parametrize("make", [drafter, dflash])
def test_the_loss_is_that_of_the_paper(make: Any) -> None:
    """Value and gradient, the Markov head's included."""
    model = make(position_weights="dpace", pace_smoothing=ALPHA)
    batch, features = FIRST
    expected = obvious(model, batch, features)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = model(batch, features).sums["draft"] / model.denominators(batch)["draft"]
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    for name, value in wanted.items():
        found = dict(model.named_parameters())[name].grad
        assert (found - value).norm() <= 1e-4 * value.norm(), name


def test_the_denominator_is_the_number_of_blocks_with_a_slot() -> None:
    model = drafter(position_weights="dpace")
    found = model.denominators(packed(FIRST, SECOND)[0])
    assert found["draft"].item() == 5.0
    assert found["confidence"].equal(drafter().denominators(packed(FIRST, SECOND)[0])["confidence"])


@pytest.mark.parametrize("make", [drafter, dflash])
def test_the_same_samples_give_the_same_gradient_however_they_are_split(make: Any) -> None:
    """Micro-batches of 3 and 2 blocks; dividing each by its own number would weigh them differently."""
    model = make(position_weights="dpace")
    apart = gradient(model, [FIRST, SECOND])
    for together in (packed(FIRST, SECOND), stacked(padded(FIRST, 40, 5), padded(SECOND, 40, 5))):
        assert (gradient(model, [together]) - apart).norm() <= 2e-6 * apart.norm()
    means = 0.5 * (gradient(model, [FIRST]) + gradient(model, [SECOND]))
    assert (means - apart).norm() > 1e-2 * apart.norm()


def test_confidence_and_metrics_stay_comparable() -> None:
    batch, features = packed(FIRST, SECOND)
    decay, pace = (drafter(position_weights=name)(batch, features) for name in ("decay", "dpace"))
    torch.testing.assert_close(pace.sums["confidence"], decay.sums["confidence"])
    assert pace.metrics.keys() == decay.metrics.keys()
    for name, ratio in decay.metrics.items():
        for value, expected in zip(pace.metrics[name], ratio, strict=True):
            torch.testing.assert_close(value, expected)
    assert (pace.sums["draft"] - decay.sums["draft"]).abs() > 1e-2


def test_divergences_are_measured_where_they_are_asked_for() -> None:
    batch, features = FIRST
    assert not {"soft_ce", "reverse_kl", "jsd"} & drafter()(batch, features).metrics.keys()
    metrics = drafter(reverse_kl=0.5, jsd=0.5)(batch, features).metrics
    assert {"reverse_kl", "jsd"} <= metrics.keys()
    assert 0.0 < (metrics["jsd"].numerator / metrics["jsd"].denominator).item() < math.log(2.0)


def test_no_position_weights_count_every_slot_alike() -> None:
    assert DSparkConfig(gamma=3, position_weights="none").slot_weights == [1.0] * 3
    assert DSparkConfig(gamma=3).slot_weights == [math.exp(-j / 4.0) for j in range(3)]


@pytest.mark.parametrize("cls", [DSparkConfig, DFlashConfig])
def test_mistakes_name_the_key(cls: Any) -> None:
    assert cls(position_weights="dpace", pace_smoothing=1.0).problems() == []
    (problem,) = cls(position_weights="pace").problems()
    assert problem == "drafter.position_weights='pace' must be decay, none or dpace"
    for value in (0.0, 1.5, math.nan):
        (problem,) = cls(pace_smoothing=value).problems()
        assert problem == f"drafter.pace_smoothing={value} must be above 0 and at most 1"


def test_chains_have_no_such_key() -> None:
    values = {**drafter_to_dict(Eagle3Config()), "position_weights": "dpace"}
    with pytest.raises(ConfigError, match=r"drafter\.position_weights is not a key of Eagle3Config"):
        drafter_from_dict(values)


def test_a_configuration_of_before_these_keys_is_read() -> None:
    values = drafter_to_dict(DSparkConfig(decay=7.0))
    for name in ("position_weights", "pace_smoothing", "reverse_kl", "jsd"):
        del values[name]
    assert drafter_from_dict(values) == DSparkConfig(decay=7.0)
