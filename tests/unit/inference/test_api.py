"""The Python interface: whole answers, streamed ones, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec.errors import TargetError, UserError
from deepspec.inference.__main__ import main
from deepspec.inference.api import TextModel, load
from deepspec.inference.proposers import PlainProposer
from deepspec.inference.sampling import SamplerSettings
from deepspec.targets.target import Target
from tests.helpers import tiny_model, tiny_tokenizer
from tests.unit.export.tiny import make_package

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a package and its target's folder."""
    work = tmp_path_factory.mktemp("api")
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(work / "target")
    tokenizer.save_pretrained(work / "target")
    return make_package(work / "package", "fp16", Target(model, tokenizer, name="target"), whole=True), work / "target"


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> TextModel:
    return load(*folders, device="cpu")


def test_an_answer_is_the_targets_own(model: TextModel) -> None:
    answer = model.generate("hi there", max_new_tokens=20)
    assert answer.text == TextModel(model.target, PlainProposer()).generate("hi there", max_new_tokens=20).text
    assert len(answer.generation.tokens) <= 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_is_the_answer_in_pieces(model: TextModel, temperature: float) -> None:
    settings = SamplerSettings(temperature, seed=3)
    whole = model.generate("hi there", max_new_tokens=20, settings=settings)
    stream = model.stream("hi there", max_new_tokens=20, settings=settings)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text == stream.answer.text
    assert stream.answer.generation.tokens == whole.generation.tokens
    assert list(stream) == []


def test_a_stream_that_was_interrupted_does_not_go_on(model: TextModel) -> None:
    stream = model.stream("hi", max_new_tokens=20)
    next(stream)
    with pytest.raises(UserError, match="not complete"):
        _ = stream.answer
    model.generate("another", max_new_tokens=3)
    with pytest.raises(UserError, match="another text was begun"):
        list(stream)


def test_mistakes_show_before_the_first_piece(model: TextModel) -> None:
    with pytest.raises(UserError, match="gamma is 9"):
        model.stream("hi", gamma=9)


def test_prompts_are_texts_or_conversations(model: TextModel) -> None:
    said = [{"role": "user", "content": "hi"}]
    assert model.prompt_ids("hi") == model.prompt_ids(said)
    assert model.prompt_ids([{"role": "system", "content": "be brief"}, *said]) != model.prompt_ids(said)
    assert model.prompt_ids("hi", raw=True) == list(model.target.tokenizer("hi")["input_ids"])
    with pytest.raises(UserError, match="raw=True"):
        model.prompt_ids(said, raw=True)


def test_what_cannot_be_loaded_is_named(folders: tuple[Path, Path]) -> None:
    package, target = folders
    with pytest.raises(UserError, match="dtype int3: must be fp32, bf16, fp16"):
        load(package, target, dtype="int3")
    with pytest.raises(TargetError, match="no such folder"):
        load(package, "/no/such/folder")


def test_the_command_line_streams_the_same_text(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    package, target = map(str, folders)
    said = []
    for way in ("--stream", "--no-stream"):
        arguments = [package, "--target", target, "--prompt", "hi there", "--max-new-tokens", "20", way]
        assert main(arguments) == 0
        said.append(capsys.readouterr().out.partition("\n\n[")[0])
    assert said[0] == said[1]


BASE_ONLY = """
import sys

BANNED = {"deepspeed", "datasets", "hydra", "omegaconf", "wandb", "bitsandbytes", "gguf", "matplotlib"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BANNED:
            raise ImportError(f"{name} is not part of the base installation")

sys.meta_path.insert(0, Refuse())
from deepspec.inference.api import load
model = load(sys.argv[1], sys.argv[2], device="cpu")
text = "".join(model.stream("hi", max_new_tokens=6))
parts = {name.split(".")[1] for name in sys.modules if name.startswith("deepspec.")}
print(sorted(parts & {"export", "config", "engine", "checkpoint", "features", "data", "evaluation", "scheduling"}))
"""


def test_the_base_installation_is_enough(folders: tuple[Path, Path]) -> None:
    """With every package of the extras out of reach, a package loads, checks itself and streams."""
    done = subprocess.run(
        [sys.executable, "-c", BASE_ONLY, *map(str, folders)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]"]
