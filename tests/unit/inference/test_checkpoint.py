"""A training checkpoint as decoding takes it: where its drafter lands, and the targets it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspec.drafters.files import save_drafter
from deepspec.errors import PackageError
from deepspec.inference.checkpoint import load_checkpoint
from deepspec.targets.target import Target
from tests.unit.export.tiny import make_drafter, make_target


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture
def checkpoint(tmp_path: Path, target: Target) -> Path:
    drafter, config = make_drafter(target)
    save_drafter(tmp_path, drafter, config, target.info)
    return tmp_path


def test_it_is_bound_and_lies_on_the_targets_device(checkpoint: Path, target: Target) -> None:
    drafter = load_checkpoint(checkpoint, target)
    assert drafter.head is target.head
    assert not drafter.training
    elsewhere = SimpleNamespace(info=target.info, head=target.head.to("meta"))
    assert {t.device.type for t in load_checkpoint(checkpoint, elsewhere).state_dict().values()} == {"meta"}


def test_another_revision_is_refused_unless_allowed(checkpoint: Path, target: Target) -> None:
    other = SimpleNamespace(info=replace(target.info, fingerprint="other"), head=target.head)
    with pytest.raises(PackageError, match=r"the checkpoint was trained .*fingerprint is 'other'.*allow_other_target"):
        load_checkpoint(checkpoint, other)
    assert load_checkpoint(checkpoint, other, allow_other_target=True).conventions.gamma == 4


@pytest.mark.parametrize(("name", "value"), [("num_layers", 7), ("model_type", "qwen3"), ("logit_scale", 0.5)])
def test_a_target_of_another_structure_is_always_refused(
    checkpoint: Path, target: Target, name: str, value: Any
) -> None:
    other = SimpleNamespace(info=replace(target.info, **{name: value}), head=target.head)
    with pytest.raises(PackageError, match=rf"the checkpoint does not fit this target: {name} is {value!r}"):
        load_checkpoint(checkpoint, other, allow_other_target=True)
