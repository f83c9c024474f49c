"""Samples as text with marks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspec.contracts import Conversation, Sample
from deepspec.data.chat import ChatRenderer
from deepspec.data.show import marked_text, show_samples
from deepspec.log import printable


@pytest.fixture
def sample(tokenizer: Any) -> Sample:
    conversation = Conversation("x", (("user", "hi \x1b[31m"), ("assistant", "a model ü")), "", "stop")
    result = ChatRenderer(tokenizer).render(conversation)
    assert isinstance(result, Sample)
    return result


def test_plain_and_coloured_marks(sample: Sample, tokenizer: Any) -> None:
    assert marked_text(sample, tokenizer, color=False).endswith("assistant\n«a model ü<|im_end|>»")
    assert marked_text(sample, tokenizer, color=True).endswith("assistant\n\x1b[32ma model ü<|im_end|>\x1b[0m")
    assert "\x1b[31m" not in marked_text(sample, tokenizer, color=True), "data cannot steer the terminal"


def test_show_prints_the_first(sample: Sample, tokenizer: Any, capsys: Any) -> None:
    show_samples([sample, sample], tokenizer, 1)
    out = capsys.readouterr().out
    assert out.count("--- x:") == 1
    assert f"{sum(sample.loss_mask)} supervised" in out


def test_printable_keeps_words_apart_and_drops_what_steers() -> None:
    assert printable("a\u00a0b\u3000c\td\r\ne \x1b[2J\x07\x9b\u202eü🙂") == "a b c\td \ne [2Jü🙂"


def test_an_id_cannot_steer_the_terminal(sample: Sample, tokenizer: Any, capsys: Any) -> None:
    show_samples([replace(sample, id="\x1b[31mx")], tokenizer, 1)
    assert "\x1b[31m" not in capsys.readouterr().out
