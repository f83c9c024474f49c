"""The command evaluate on a tiny run: tables, report files, packages, and one message for each mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspec.evaluate import main
from tests.helpers import tiny_model, tiny_tokenizer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def evaluate(run_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Run:
    monkeypatch.chdir(run_folder.parent)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evaluate", f"run={run_folder}", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return call


SHORT = (
    "evaluate.max_new_tokens=10",
    "evaluate.timing_prompts=2",
    "evaluate.timing_new_tokens=6",
    "evaluate.bootstrap=20",
)


def test_tables_and_files(evaluate: Run, run_folder: Path) -> None:
    code, out, err = evaluate(*SHORT)
    assert code == 0, err
    assert "Accepted length, gamma 3, greedy" in out
    assert "prompt lookup" in out
    assert "4 of 4 texts equal token for token" in out
    assert "speculative" in out
    record = json.loads((run_folder / "evaluation" / "report.json").read_text())
    assert record["scores"]["acceptance"]["tiny"]["prompts"] == 4
    assert record["subject"]["drafter"].endswith("step-000001")


def test_limit_gamma_and_out(evaluate: Run, tmp_path: Path) -> None:
    code, out, err = evaluate(
        *SHORT, "evaluate.limit=2", "evaluate.gamma=2", "evaluate.timing_prompts=0", f"out={tmp_path}"
    )
    assert code == 0, err
    assert "gamma 2" in out
    assert "Speed" not in out
    assert json.loads((tmp_path / "report.json").read_text())["scores"]["acceptance"]["tiny"]["prompts"] == 2


def test_mistakes_end_with_2(evaluate: Run) -> None:
    code, _, err = evaluate("evaluate.gamma=7")
    assert code == 2
    assert "evaluate.gamma=7" in err
    code, _, err = evaluate("package=no/such/package")
    assert code == 2
    assert "no/such/package" in err


def test_another_target_is_refused(evaluate: Run, tmp_path: Path) -> None:
    """A checkpoint is bound to the target it was trained with; another revision has to be allowed."""
    tiny_tokenizer().save_pretrained(tmp_path / "revision")
    tiny_model("llama", seed=9).save_pretrained(tmp_path / "revision")
    arguments = (*SHORT, "evaluate.timing_prompts=0", f"target.path={tmp_path / 'revision'}", f"out={tmp_path}")
    code, _, err = evaluate(*arguments)
    assert code == 2
    assert "the checkpoint was trained with another revision of tiny: fingerprint is" in err
    code, _, err = evaluate(*arguments, "allow_other_target=true")
    assert code == 0, err
    tiny_model("qwen3").save_pretrained(tmp_path / "revision")
    code, _, err = evaluate(*arguments, "allow_other_target=true")
    assert code == 2
    assert "the checkpoint does not fit this target: model_type is 'qwen3', the checkpoint says 'llama'" in err


def test_the_device_is_the_engines(evaluate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = evaluate("engine.device=cuda")
    assert code == 2
    assert "engine.device=cuda, but PyTorch finds no CUDA device" in err
