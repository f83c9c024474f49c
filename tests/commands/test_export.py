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
QUICK = ("export.verify_prompts=2", "evaluate.max_new_tokens=6", "export.max_length_change=1")


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
    files = {"card.md", "config.json", "model.safetensors", "calibration.json", "selfcheck.json"}
    assert {p.name for p in folder.iterdir()} == files | {"checksums.json"}
    assert set(json.loads((folder / "checksums.json").read_text())["sha256"]) == files
    for words in ("accepted length, greedy", "linears of the layers", f"package: {folder}"):
        assert words in out
    assert read_config(folder).profile == profile


def test_keys_that_bend_a_profile_reach_the_package(export: Run, tmp_path: Path) -> None:
    bent = ("export.qkv=16bit", "export.overflow=bf16", "export.verify_samples=2")
    code, out, err = export(f"export.out={tmp_path / 'p'}", "export.profile=fp16_int8_full", *bent)
    assert code == 0, err
    assert set(read_config(tmp_path / "p").quantisation) == {"mlp", "layers", "fusion", "markov"}
    assert "of which: copies left out" in out
    assert "| tiny   | 2 " in out, "two samples of the one domain"


def test_the_default_is_int8_and_loads(export: Run, run_folder: Path, tmp_path: Path) -> None:
    from deepspec.config.resolve import load_config

    code, _, err = export(f"export.out={tmp_path / 'mine'}", "target.template_options={quick: true}")
    assert code == 0, err
    assert read_config(tmp_path / "mine").profile == "fp16_int8"
    assert read_config(tmp_path / "mine").template_options == {"quick": True}
    assert "chat template's options" in (tmp_path / "mine" / "card.md").read_text()
    load_package(tmp_path / "mine", load_target(load_config(run_folder).target))


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
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


def test_a_consumer_that_is_asked_for_has_to_load_it(export: Run, tmp_path: Path) -> None:
    code, _, err = export(f"export.out={tmp_path / 'p'}", "export.layout=universal", "export.consumer=[published_eval]")
    assert code == 2
    assert "the published evaluation code: nothing fills parameter embed_tokens.weight" in err
    assert list(tmp_path.iterdir()) == []
