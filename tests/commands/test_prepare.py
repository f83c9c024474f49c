"""The command prepare on a tiny target: answers, samples, report, and one message for each mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspec.contracts import Conversation
from deepspec.data.conversations import needs_answer, read_conversations, write_conversations
from deepspec.prepare import main
from tests.helpers import MASK_TOKEN_ID, tiny_model, tiny_tokenizer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_model(layers=6).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    asked = [Conversation(f"chat/a/{i}", (("user", f"say {i}"),), "chat") for i in range(3)]
    answered = Conversation("chat/b/1", (("user", "hi"), ("assistant", "hello you")), "chat", "stop")
    write_conversations(tmp_path / "train.jsonl", [*asked, answered])
    other = (("user", "count the trees"), ("assistant", "one two three"))
    write_conversations(tmp_path / "test.jsonl", [Conversation("code/c/1", other, "code", "stop")])
    return tmp_path


@pytest.fixture
def run(files: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Run:
    monkeypatch.setenv("DEEPSPEC_CACHE", str(files / "cache"))
    monkeypatch.chdir(files)

    def call(*overrides: str) -> tuple[int, str, str]:
        common = [
            "recipe=quickstart", "target=path", f"target.path={target}", "target.name=tiny",
            f"target.mask_token_id={MASK_TOKEN_ID}", "data=jsonl", f"data.path={files / 'train.jsonl'}",
            f"data.test={files / 'test.jsonl'}", "generate.max_new_tokens=6", "engine.device=cpu",
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["prepare", *common, *overrides])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_answers_samples_report_and_a_second_call_from_the_cache(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("show=1", "out=answered")
    assert code == 0, err
    assert "train: 3 prompts answered" in out
    assert "gives other tokens than the target said" in out
    assert "test: 0 prompts" not in out
    assert "4 conversations -> 4 samples" in out
    assert "test prompts above 0.7" in out or "not measured" in out
    assert "template families in more than one split: 0" in out
    assert out.count("«") == 1
    written = list(read_conversations(files / "answered" / "train.jsonl"))
    assert [c.id for c in written] == ["chat/a/0", "chat/a/1", "chat/a/2", "chat/b/1"]
    assert not any(needs_answer(c) for c in written)
    assert {c.finish_reason for c in written} <= {"stop", "length"}
    monkeypatch.setattr("deepspec.targets.load.load_target", lambda *_: pytest.fail("loaded the target again"))
    code, again, err = run()
    assert code == 0, err
    assert "4 conversations -> 4 samples" in again


def test_modes_stop_early(run: Run, files: Path) -> None:
    code, out, _ = run("mode=target")
    assert (code, out.count("\n")) == (0, 1)
    assert not (files / "cache").exists()
    code, out, _ = run("mode=answers")
    assert code == 0
    assert "samples" not in out
    assert [p.name for p in (files / "cache").iterdir()] == ["answers"]


def test_mode_target_fetches_the_weights_of_a_hub_id(run: Run, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(target)

    monkeypatch.setattr("deepspec.targets.load.load_tokenizer", lambda _: (None, ()))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    code, out, err = run("mode=target", "target.path=org/model")
    assert code == 0, err
    assert asked == ["org/model"]
    assert out == f"target tiny: {target}\n"


def test_a_malformed_line_is_the_users_mistake(run: Run, files: Path) -> None:
    with (files / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "x", "messages": []}) + "\n")
    code, _, err = run()
    assert code == 2
    assert "train.jsonl:5: messages must be a list with at least one message" in err
    assert "Traceback" not in err


def test_a_target_without_chat_template_is_refused(run: Run, target: Path, files: Path) -> None:
    bare = files / "bare"
    tiny_tokenizer(None).save_pretrained(bare)
    (bare / "config.json").write_text((target / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    code, _, err = run(f"target.path={bare}")
    assert code == 2
    assert "no chat template" in err
    assert "target.path" in err
