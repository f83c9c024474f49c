"""The command line: what it prints, its exit codes, and that it pulls in nothing of training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from deepspec.export.package import native_package, staged, write_package
from deepspec.inference.__main__ import main
from deepspec.inference.decoder import Generation, SpeculativeDecoder
from deepspec.targets.target import Target
from tests.helpers import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from tests.unit.export.tiny import make_drafter

TRAINING = ("deepspeed", "datasets", "hydra", "omegaconf", "wandb", "bitsandbytes", "gguf", "matplotlib")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_no_training_package_is_imported(folder: Path) -> None:
    program = (
        "import sys\nfrom deepspec.inference.__main__ import main\n"
        f"code = main(['--target', {str(folder)!r}, '--prompt', 'hi', '--plain', '--max-new-tokens', '4'])\n"
        "import deepspec.inference.api, deepspec.inference.package\n"
        f"sys.stderr.write(repr([m for m in {TRAINING} if m in sys.modules]))\nsys.exit(code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("[]")
    assert "accepted length 1.00" in done.stdout


@pytest.mark.parametrize("mode", ["--plain", "--prompt-lookup"])
def test_json(folder: Path, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    arguments = ["--target", str(folder), "--prompt", "hi hi hi", mode, "--max-new-tokens", "6", "--json"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["tokens"]) <= 6
    assert sum(r["committed"] for r in result["rounds"]) == len(result["tokens"]) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plain", "--prompt-lookup"], "exclude each other"),
        ([], "name a package folder"),
        (["--plain", "--temperature", "-1"], "temperature is -1"),
        (["--plain", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--plain", "--threads", "0"], "--threads=0"),
        (["no-such-package"], "no-such-package"),
        (["--plain", "--raw", "--system", "be brief"], "--raw uses no chat template"),
        (["--plain", "--raw", "--template-option", "a=1"], "--raw uses no chat template"),
        (["--plain", "--template-option", "a"], "--template-option a: must be KEY=VALUE"),
        (["--plain", "--template-option", "tokenize=true"], "refuses the prompt"),
        (["--plain", "--device", "cud"], "device cud: is no device"),
        (["--plain", "--device", "cuda:99"], "device cuda:99: PyTorch finds"),
        (["--plain", "--device", "meta"], "device meta: PyTorch finds 0"),
        (["--plain", "--json", "--stream"], "--json prints one object"),
    ],
)
def test_mistakes_end_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["--target", str(folder), "--prompt", "hi", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_target_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "/no/such/folder", "--prompt", "hi", "--plain"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_target_without_chat_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer(chat_template=None).save_pretrained(tmp_path)
    arguments = ["--target", str(tmp_path), "--prompt", "hi", "--plain", "--max-new-tokens", "3"]
    assert main(arguments) == 2
    assert "--raw" in capsys.readouterr().err
    assert main([*arguments, "--raw"]) == 0


def test_an_answer_cannot_steer_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *arguments, **options: "\x1b[31mred\x07\nline")
    assert main(["--target", str(folder), "--prompt", "hi", "--plain", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("[31mred\nline\n\n[2 tokens")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return a target whose template knows an option, and a package that was trained with it set."""
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE + "{% if quiet is defined and quiet %}<{{ quiet }}>{% endif %}")
    tiny_model().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    target = Target(tiny_model(), tokenizer, name="target")
    drafter, config = make_drafter(target)
    with staged(folder / "package") as package:
        write_package(package, *native_package(drafter, config, target.info, "fp16", {"quiet": "yes"}))
    return str(folder / "target"), str(folder / "package")


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        (["PACKAGE"], "<yes>"),
        (["PACKAGE", "--plain"], "<yes>"),
        (["PACKAGE", "--template-option", "quiet=false"], "assistant\n"),
        (["PACKAGE", "--template-option", "quiet=very"], "<very>"),
        (["--plain"], "assistant\n"),
        (["--plain", "--template-option", "quiet=1"], "<1>"),
    ],
)
def test_the_prompt_is_rendered_as_in_training(
    thinking: tuple[str, str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], ending: str
) -> None:
    target, package = thinking
    prompts: list[str] = []
    generate = SpeculativeDecoder.generate

    def note(decoder: SpeculativeDecoder, prompt_ids: list[int], *rest: Any) -> Generation:
        prompts.append(str(tiny_tokenizer().decode(prompt_ids)))
        return generate(decoder, prompt_ids, *rest)

    monkeypatch.setattr(SpeculativeDecoder, "generate", note)
    own = [package if word == "PACKAGE" else word for word in arguments]
    assert main(["--target", target, "--prompt", "hi", "--max-new-tokens", "3", *own]) == 0
    assert prompts[0].endswith(ending)
