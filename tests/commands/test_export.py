"""The command export on a tiny run: the package, its report, and one message for each mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.export import verify
from deepspec.export.__main__ import main
from deepspec.inference.package import load_package
from deepspec.inference.package_config import read_config
from deepspec.targets.load import load_target

Run = Callable[..., tuple[int, str, str]]
QUICK = (
    "export.verify_prompts=2", "export.calibration_prompts=2", "evaluate.max_new_tokens=6", "export.max_length_change=1"
)  # fmt: skip


@pytest.fixture
def export(run_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Run:
    monkeypatch.chdir(run_folder.parent)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["export", f"run={run_folder}", *QUICK, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.mark.parametrize("profile", ["bf16", "fp16_int8"])
def test_each_profile_is_written_into_the_run_folder(export: Run, run_folder: Path, profile: str) -> None:
    code, out, err = export(f"export.profile={profile}")
    assert code == 0, err
    folder = run_folder / f"package-{profile}"
    checked = ["calibration.json", "card.md", "config.json", "model.safetensors", "selfcheck.json"]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*checked, "checksums.json"])
    assert sorted(json.loads((folder / "checksums.json").read_text())["sha256"]) == checked
    for words in ("accepted length, greedy", "linears of the layers", "temperature", f"package: {folder}"):
        assert words in out
    assert read_config(folder).profile == profile


def test_the_default_is_int8_and_loads(export: Run, run_folder: Path, tmp_path: Path) -> None:
    from deepspec.config.resolve import load_config

    code, _, err = export(f"export.out={tmp_path / 'mine'}", "target.template_options={quick: true}")
    assert code == 0, err
    assert read_config(tmp_path / "mine").profile == "fp16_int8"
    assert read_config(tmp_path / "mine").template_options == {"quick": True}
    assert "chat template's options" in (tmp_path / "mine" / "card.md").read_text()
    load_package(tmp_path / "mine", load_target(load_config(run_folder).target))


def test_the_calibration_is_of_the_validation_split_and_on_the_card(export: Run, tmp_path: Path) -> None:
    code, _, err = export(f"export.out={tmp_path / 'p'}", "evaluate.temperature=1.0", "evaluate.max_new_tokens=9")
    assert code == 0, err
    found = json.loads((tmp_path / "p" / "calibration.json").read_text())
    assert (found["split"], found["prompts"], found["decoding_temperature"]) == ("validation", 2, 1.0)
    assert found["max_new_tokens"] == 9
    assert len(found["temperatures"]) == len(found["auc_after"]) == 3
    card = (tmp_path / "p" / "card.md").read_text()
    for words in ("calibrated on 2 prompts of the validation split", "accepted length [95 %]", "commit: ", "data: "):
        assert words in card


def test_without_prompts_the_confidence_stays_as_trained(export: Run, tmp_path: Path) -> None:
    code, _, err = export(f"export.out={tmp_path / 'p'}", "export.calibration_prompts=0", "data.validation=null")
    assert code == 0, err
    assert not (tmp_path / "p" / "calibration.json").exists()
    assert read_config(tmp_path / "p").calibration is None
    assert "confidence: not calibrated" in (tmp_path / "p" / "card.md").read_text()


def test_four_bits_are_rounded_on_the_validation_split(export: Run, tmp_path: Path) -> None:
    bits = ("export.profile=int4_mlp", "export.calibration_prompts=0", "export.force=true")
    code, _, err = export(*bits, f"export.out={tmp_path / 'fitted'}")
    assert code == 0, err
    assert "rounded one by one" not in err
    unanswered = tmp_path / "unanswered.jsonl"
    unanswered.write_text('{"id": "a", "messages": [{"role": "user", "content": "say 1"}]}\n', encoding="utf-8")
    for split, words in (("null", "data.validation is not set"), (unanswered, "has no answered conversation")):
        out = tmp_path / "plain"
        code, _, err = export(*bits, f"export.out={out}", f"data.validation={split}")
        assert code == 0, err
        assert f"{words}: 4-bit values are rounded one by one" in err
        assert not same_weights(out, tmp_path / "fitted")


def same_weights(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def test_copies_of_the_embedding_are_stored_when_they_are_asked_for(export: Run, tmp_path: Path) -> None:
    code, _, err = export(f"export.out={tmp_path / 'p'}", "export.include_embeddings=true")
    assert code == 0, err
    assert read_config(tmp_path / "p").stored_embeddings is not None
    assert "copies of them are here" in (tmp_path / "p" / "card.md").read_text()


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("data.validation=null", 2, "data.validation is not set"),
        ("export.calibration_prompts=-1", 2, "export.calibration_prompts=-1: must not be negative"),
        ("export.max_length_change=-2", 2, "export.max_length_change"),
        ("export.profile=int3", 2, "export.profile"),
        ("source=elsewhere", 2, "elsewhere/config.json is missing"),
        ("export.server_quantisation=w8a8", 2, "export.server_quantisation=w8a8: is for layouts of servers"),
        ("export.consumer=[tgi]", 2, "export.consumer=tgi: must be vllm, sglang"),
        ("export.layout=zlab_dflash", 2, "export.layout=zlab_dflash: its blocks are fill-in"),
        ("export.layout=univrsal", 2, "did you mean universal?"),
        ("data.test=null", 2, "data.test"),
        ("export.out=.", 2, "export.out"),
        ("run=nowhere", 2, "nowhere"),
    ],
)
def test_a_mistake_has_one_message_and_leaves_nothing(
    export: Run, tmp_path: Path, argument: str, code: int, words: str
) -> None:
    given, _, err = export(f"export.out={tmp_path / 'p'}", argument)
    assert given == code, err
    assert words in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_strays_ends_with_1_and_leaves_nothing(
    export: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(verify.MEAN_TV_LIMIT, "fp16_int8", 0.0)
    code, _, err = export(f"export.out={tmp_path / 'p'}")
    assert code == 1
    assert "error: the package was not written" in err
    assert "export.force=true" in err
    assert list(tmp_path.iterdir()) == []
    code, _, err = export(f"export.out={tmp_path / 'p'}", "export.force=true")
    assert code == 0, err
    assert "Written by force" in (tmp_path / "p" / "card.md").read_text()


def test_the_device_is_the_engines(export: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = export("engine.device=cuda")
    assert code == 2
    assert "engine.device=cuda, but PyTorch finds no CUDA device" in err


def test_a_layout_for_servers_is_written_checked_and_comes_back(export: Run, run_folder: Path, tmp_path: Path) -> None:
    from deepspec.checkpoint.store import newest_drafter
    from deepspec.config.resolve import load_config
    from deepspec.drafters.files import load_drafter

    out, layout = tmp_path / "served", ("export.layout=universal", "export.server_quantisation=w8a8")
    for _ in range(2):  # the second one replaces the first
        code, said, err = export(f"export.out={out}", *layout, "export.fold_temperature=2")
        assert code == 0, err
    assert sorted(p.name for p in out.iterdir()) == ["card.md", "checksums.json", "config.json", "model.safetensors"]
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3DSparkModel"], "bfloat16")
    card = (out / "card.md").read_text()
    for words in ("SGLang (not run)", "vLLM (not run)", "log-odds divided by 2", "INT8, activations too"):
        assert words in card
    for consumer in ("vLLM", "SGLang", "speculators"):
        assert consumer in said
    code, said, err = export(f"source={out}", f"export.out={tmp_path / 'back'}")
    assert code == 0, err
    assert f"imported: {tmp_path / 'back'}" in said
    assert load_config(tmp_path / "back").drafter == load_config(run_folder).drafter
    load_drafter(newest_drafter(tmp_path / "back"))


def test_a_layout_that_is_a_dspark_brings_its_temperatures_along(export: Run, tmp_path: Path) -> None:
    code, _, err = export(f"export.out={tmp_path / 'served'}", "export.layout=universal")
    assert code == 0, err
    found = json.loads((tmp_path / "served" / "dspark_sts.json").read_text())["temperatures"]
    assert len(found) == 3
    assert all(temperature > 0 for temperature in found)


def test_a_consumer_that_is_asked_for_has_to_load_it(export: Run, tmp_path: Path) -> None:
    code, _, err = export(f"export.out={tmp_path / 'p'}", "export.layout=universal", "export.consumer=[published_eval]")
    assert code == 2
    assert "the published evaluation code: nothing fills parameter embed_tokens.weight" in err
    assert list(tmp_path.iterdir()) == []
