"""8-bit AdamW: close to AdamW, skipped steps, checkpoints, and what is refused."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspec.engine.adamw8bit import MIN_SIZE, moment_layout
from deepspec.engine.loop import Trainer
from deepspec.engine.optim import make_optimizers
from deepspec.engine.update import Update
from deepspec.errors import ConfigError, PackageError
from tests.unit.engine import toy

OPTIM = replace(toy.OPTIM, name="adamw8bit", lr=1e-3)
WIDTH = 600  # the toy's matrices are then above bitsandbytes' smallest size, its norms and biases below


def trainer(steps: int, name: str = "adamw8bit", **engine: Any) -> tuple[Trainer, nn.Module]:
    drafter = toy.ToyConfig(width=WIDTH).build(toy.INFO, (1, 2), 3)
    optim = replace(OPTIM, name=name)  # type: ignore[arg-type]
    return toy.make_trainer(steps=steps, engine=toy.engine_config(**engine), optim=optim, drafter=drafter), drafter


def weights(drafter: nn.Module) -> torch.Tensor:
    return toy.flat({name: value.detach().clone() for name, value in drafter.state_dict().items()})


def test_close_to_adamw() -> None:
    """After 50 steps the update differs by less than a tenth of it."""
    ends = []
    for name in ("adamw", "adamw8bit"):
        run, drafter = trainer(50, name)
        start = weights(drafter)
        run.run()
        ends.append(weights(drafter) - start)
    assert 0.0 < toy.relative(ends[1], ends[0]) < 0.1


def test_moments_take_a_byte_where_parameters_are_large() -> None:
    run, drafter = trainer(2)
    run.run()
    moments = run.engine.export_state().moments
    for name, parameter in drafter.named_parameters():
        found = {key: (value.dtype, tuple(value.shape)) for key, value in moments[name].items()}
        assert found == moment_layout(parameter), name
    large = {name for name, parameter in drafter.named_parameters() if parameter.numel() >= MIN_SIZE}
    assert {"up.weight", "down.weight"} <= large
    assert {name for name in moments if moments[name]["state1"].dtype == torch.uint8} == large


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, expected = trainer(6)
    whole.run()
    first, trained = trainer(3)
    first.run()
    store = toy.make_store(tmp_path, first.drafter)
    store.save(first.engine.export_state(), first.progress)
    assert not weights(trained).equal(weights(expected))
    second, drafter = trainer(6)
    second.resume(store.load("step-000003"))
    second.run()
    assert weights(drafter).equal(weights(expected))


def test_what_is_not_finite_is_skipped() -> None:
    module = nn.Linear(80, 80)
    (optimizer,) = make_optimizers(module, OPTIM)
    update = Update(1.0, None)

    def step(value: float) -> float:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        assert module.weight.grad is not None
        module.weight.grad[0, 0] = value
        return update([p.grad for p in module.parameters() if p.grad is not None], [optimizer]).skipped.item()

    assert step(0.2) == 0.0
    before = [p.detach().clone() for p in module.parameters()]
    moments = {key: value.clone() for key, value in optimizer.state[module.weight].items() if torch.is_tensor(value)}
    assert step(math.nan) == 1.0
    assert all(p.equal(b) for p, b in zip(module.parameters(), before, strict=True))
    assert all(optimizer.state[module.weight][key].equal(value) for key, value in moments.items())
    assert optimizer.state[module.weight]["step"] == 1


def test_what_decays() -> None:
    (optimizer,) = make_optimizers(toy.make_drafter(), OPTIM)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [OPTIM.weight_decay, 0.0]


@pytest.mark.parametrize(("wrote", "reads"), [("adamw", "adamw8bit"), ("adamw8bit", "adamw")])
def test_a_checkpoint_of_the_other_optimiser_is_refused(wrote: str, reads: str) -> None:
    first, _ = trainer(1, wrote)
    first.run()
    second, _ = trainer(2, reads)
    with pytest.raises(ConfigError, match=r"optim\.name differs from the run that wrote it"):
        second.engine.import_state(first.engine.export_state())


def test_a_changed_checkpoint_is_refused_before_it_is_read() -> None:
    first, _ = trainer(1)
    first.run()
    state = first.engine.export_state()
    state.moments["up.weight"]["absmax1"] = torch.zeros(1)
    second, _ = trainer(2)
    with pytest.raises(PackageError, match=r"absmax1 of up\.weight has type torch\.float32 and shape \[1\]"):
        second.engine.import_state(state)


def test_bitsandbytes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"optim\.name=adamw8bit needs the package bitsandbytes.*deepspec\[train\]"):
        make_optimizers(toy.make_drafter(), OPTIM)


def test_zero_stages_that_split_parameters_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r"optim\.name=adamw8bit with engine\.zero_stage=1"):
        trainer(1, kind="deepspeed", zero_stage=1)


def test_bitsandbytes_is_imported_in_one_file() -> None:
    root = Path(__file__).parents[3] / "deepspec"
    importers = [path.name for path in root.rglob("*.py") if "import bitsandbytes" in path.read_text(encoding="utf-8")]
    assert importers == ["adamw8bit.py"]
