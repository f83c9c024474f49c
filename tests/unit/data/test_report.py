"""What prepare prints about the splits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deepspec.contracts import Conversation
from deepspec.data.chat import ChatRenderer
from deepspec.data.conversations import write_conversations
from deepspec.data.prepare import prepare_samples
from deepspec.data.report import repetition_line, separation_lines, split_lines


def talk(sample_id: str, question: str, answer: str = "yes it is") -> Conversation:
    return Conversation(sample_id, (("system", "be brief"), ("user", question), ("assistant", answer)), "c", "stop")


def test_split_report_and_repetition(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    write_conversations(path, [talk("c/a/1", "x", "no no no no no no no no no no no no"), talk("c/a/2", "y")])
    samples = prepare_samples(path, ChatRenderer(tokenizer), tmp_path)
    lines = split_lines("train", path, samples)
    assert lines[0] == f"train: {path}"
    assert lines[1].startswith("  2 conversations -> 2 samples")
    shares = [float(x) for x in re.findall(r"([\d.]+)%", repetition_line(samples))]
    assert len(shares) == 2
    assert 30 < shares[1] <= shares[0] < 100


def test_separation_ignores_the_system_prompt_and_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("datasketch")
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_conversations(train, [talk("c/a/1", "how do ships float"), talk("c/b/1", "why is the sea salty")])
    write_conversations(test, [talk("c/c/1", "count the words of this line")])
    lines = separation_lines({"train": train, "test": test})
    assert lines[0] == "template families in more than one split: 0"
    assert "0 test prompts above 0.7" in lines[1]
    write_conversations(test, [talk("c/b/2", "why is the sea salty"), talk("c/c/1", "count words")])
    lines = separation_lines({"train": train, "test": test})
    assert lines[0] == "template families in more than one split: 1 c/b"
    assert lines[1:] == [
        "test/train similarity (MinHash over words): 1 test prompts above 0.7; highest 1.00 (c/b/2 and c/b/1)",
        "  1.00: c/b/2 and c/b/1",
    ]
    assert separation_lines({"train": train}) == ["template families in more than one split: 0"]
