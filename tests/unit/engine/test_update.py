"""Clipping by the global norm, skipped steps, the loss scale, groups and schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from deepspec.engine.optim import make_adamw, make_optimizers, parameter_groups, split_parameters
from deepspec.engine.schedule import make_schedule
from deepspec.engine.update import GROWTH_INTERVAL, LossScaler, Update
from deepspec.errors import ConfigError
from tests.unit.engine import toy

CPU = torch.device("cpu")


def test_clipping_uses_the_norm_of_all_gradients() -> None:
    """Gradients [3] and [4] with maximum 1 are both scaled by 0.2."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    info = Update(1.0, None)(grads, [torch.optim.SGD(parameters, lr=1.0)])
    assert info.grad_norm.item() == pytest.approx(5.0)
    assert [p.item() for p in parameters] == pytest.approx([-0.6, -0.8], rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_skipped(bad: float) -> None:
    module = nn.Linear(2, 2)
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = make_adamw(parameter_groups(module, toy.OPTIM), toy.OPTIM)
    update = Update(1.0, None)
    for value, skipped in ((bad, 1.0), (1.0, 0.0)):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        module.weight.grad = torch.full((2, 2), value)
        info = update([p.grad for p in module.parameters() if p.grad is not None], [optimizer])
        assert info.skipped.item() == skipped
        changed = [not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True)]
        assert all(changed) if skipped == 0.0 else not any(changed)
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}, "a skipped step does not count for the moments"


def test_loss_scale_halves_and_doubles() -> None:
    scaler = LossScaler(64.0, CPU)
    scaler.update(torch.tensor(1.0))
    assert scaler.scale.item() == 32.0
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(torch.tensor(0.0))
    copy = LossScaler(1.0, CPU)
    copy.load(scaler.state())
    for each in (scaler, copy):
        assert each.scale.item() == 32.0
        each.update(torch.tensor(0.0))
        assert each.scale.item() == 64.0
    for _ in range(20):
        scaler.update(torch.tensor(1.0))
    assert scaler.scale.item() == 1.0


def test_groups() -> None:
    """Matrices decay; norms, biases and tables do not."""
    drafter = toy.make_drafter()
    names = {id(p): n for n, p in drafter.named_parameters()}
    matrices, rest = split_parameters(drafter)
    assert [names[id(p)] for p in matrices] == ["up.weight", "down.weight"]
    assert len(matrices) + len(rest) == len(names)
    decays = [group["weight_decay"] for group in parameter_groups(drafter, toy.OPTIM)]
    assert decays == [toy.OPTIM.weight_decay, 0.0]


def test_muon_takes_the_matrices() -> None:
    drafter = toy.make_drafter()
    muon, adamw = make_optimizers(drafter, replace(toy.OPTIM, name="muon"))
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [tuple(p.shape) for p in muon.param_groups[0]["params"]] == [(12, 8), (8, 12)]


def test_muon_is_refused_by_deepspeed() -> None:
    with pytest.raises(ConfigError, match=r"optim\.name=muon"):
        toy.make_trainer(engine=toy.engine_config(kind="deepspeed"), optim=replace(toy.OPTIM, name="muon"))


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (3, 1.0), (4, 1.0), (52, 0.55), (100, 0.1), (1000, 0.1)])
def test_cosine(step: int, expected: float) -> None:
    schedule = make_schedule(100, warmup_ratio=0.04, kind="cosine", min_lr_ratio=0.1)
    assert schedule(step) == pytest.approx(expected)


def test_warm_up_stable_decay() -> None:
    schedule = make_schedule(20, warmup_ratio=0.1, kind="wsd", min_lr_ratio=0.5, decay_ratio=0.2)
    assert [schedule(step) for step in (0, 1, 2, 16, 18, 20, 30)] == [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.5]


def test_constant() -> None:
    schedule = make_schedule(10, warmup_ratio=0.2, kind="constant", min_lr_ratio=0.0)
    assert [schedule(step) for step in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]
