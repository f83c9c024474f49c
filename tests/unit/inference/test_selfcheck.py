"""The self-check at load: what it lets pass, and what it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspec.errors import PackageError, UserError
from deepspec.export.package import write_checksums
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.package import load_package
from deepspec.inference.package_config import CONFIG, SELFCHECK
from deepspec.inference.proposers import DrafterProposer
from deepspec.inference.selfcheck import CLEAR, SelfCheck, make_selfcheck, run_selfcheck
from deepspec.targets.target import Target
from tests.unit.export.tiny import edit_tensors, make_drafter, make_package, make_target

PROMPTS = [list(range(5, 15)), [7, 7, 30], list(range(3, 90))]


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


def test_what_is_stored_is_what_the_decoder_drafts_first(target: Target) -> None:
    drafter, _ = make_drafter(target)
    stored = make_selfcheck(drafter, target, PROMPTS)
    assert [len(prompt.ids) for prompt in stored.prompts] == [11, 4, 64]
    first = stored.prompts[0]
    drafted: list[list[int]] = []

    class Noting(DrafterProposer):
        def propose(self, *arguments: Any) -> Any:
            found = super().propose(*arguments)
            drafted.append([] if found is None else found.tokens.tolist())
            return found

    generation = SpeculativeDecoder(target, Noting(drafter)).generate(PROMPTS[0], 12)
    assert first.ids == (*PROMPTS[0], generation.tokens[0])
    assert list(first.tokens) == drafted[0]
    assert all(margin >= 0 for margin in first.margins)


@pytest.mark.parametrize("vocabulary", [None, 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_package_passes_in_every_precision(
    tmp_path: Path, target: Target, dtype: torch.dtype, vocabulary: int | None
) -> None:
    package = make_package(tmp_path / "p", "fp16_int8", target, whole=True, draft_vocab_size=vocabulary)
    other = make_target()
    other.model.to(dtype)
    load_package(package, Target(other.model, name=target.info.name), self_check=True)


def test_a_drafter_that_was_changed_is_refused_with_prompt_and_slot(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    edit_tensors(package, lambda tensors: tensors["fc.weight"].neg_())
    load_package(package, target)
    with pytest.raises(PackageError, match=r"selfcheck\.json: prompt \d, slot \d: the drafter proposes token \d+"):
        load_package(package, target, self_check=True)


def test_features_of_other_layers_are_noticed(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    step = target.step
    shifted: Any = lambda ids, cache, layers, **rest: step(ids, cache, [k + 1 for k in layers], **rest)  # noqa: E731
    monkeypatch.setattr(target, "step", shifted)
    with pytest.raises(PackageError, match=r"selfcheck\.json: prompt \d, slot"):
        load_package(package, target, self_check=True)


def test_a_near_tie_may_turn_out_either_way(target: Target) -> None:
    drafter, _ = make_drafter(target)
    stored = make_selfcheck(drafter, target, PROMPTS[:1]).prompts[0]
    assert run_selfcheck(SelfCheck(1, (stored,)), drafter, target) > 0
    wrong = replace(stored, tokens=(stored.tokens[0] ^ 1, *stored.tokens[1:]))
    unsure = tuple(0.0 for _ in stored.margins)
    clear, close = CLEAR[torch.float32] + 1e-6, CLEAR[torch.float32]
    with pytest.raises(PackageError, match="prompt 0, slot 0"):
        run_selfcheck(SelfCheck(1, (replace(wrong, margins=(clear, *unsure[1:])),)), drafter, target)
    assert run_selfcheck(SelfCheck(1, (replace(wrong, margins=(close, *unsure[1:])),)), drafter, target) == 0


def test_another_revision_of_the_target_has_no_self_check(
    tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    load_package(package, make_target(seed=9), allow_other_target=True, self_check=True)
    assert "no self-check" in caplog.text


def test_a_target_that_cannot_decode_is_said_so(tmp_path: Path, target: Target) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    bound = SimpleNamespace(info=target.info, head=target.head)
    load_package(package, bound)
    with pytest.raises(UserError, match="self_check"):
        load_package(package, bound, self_check=True)


@pytest.mark.parametrize(
    ("message", "edit"),
    [
        (r"prompts holds 0", lambda s: s.update(prompts=[])),
        (r"prompts holds 17", lambda s: s.update(prompts=s["prompts"][:1] * 17)),
        (r"prompts\[0\]\.ids has 1 tokens", lambda s: s["prompts"][0].update(ids=[5])),
        (r"prompts\[1\]\.ids has 65 tokens", lambda s: s["prompts"][1].update(ids=[5] * 65)),
        (r"prompts\[0\]\.tokens has 3 entries", lambda s: s["prompts"][0].update(tokens=[1, 2, 3])),
        (r"prompts\[0\]\.tokens holds 97", lambda s: s["prompts"][0]["tokens"].__setitem__(0, 97)),
        (r"prompts\[0\]\.margins holds -1", lambda s: s["prompts"][0]["margins"].__setitem__(0, -1.0)),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, target: Target, message: str, edit: Any) -> None:
    package = make_package(tmp_path / "p", "fp16", target, whole=True)
    stored = json.loads((package / SELFCHECK).read_text())
    edit(stored)
    (package / SELFCHECK).write_text(json.dumps(stored))
    write_checksums(package)
    with pytest.raises(PackageError, match=message):
        load_package(package, target)
    assert json.loads((package / CONFIG).read_text())["selfcheck"] == SELFCHECK
