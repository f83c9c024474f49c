"""Files to sample sets, and the cache that finds them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepspec.contracts import Conversation, Sample
from deepspec.data.chat import CUT_AWAY, NO_ANSWER, ChatRenderer
from deepspec.data.conversations import write_conversations
from deepspec.data.prepare import build_samples, prepare_samples
from deepspec.data.samples import load_samples
from deepspec.errors import DataError
from tests.unit.data.conftest import CHATML, make_tokenizer


def talk(i: int, answer: str | None = "a model answers", finish: str | None = "stop") -> Conversation:
    messages = (("user", f"who are you {i}"),) + ((("assistant", answer),) if answer is not None else ())
    return Conversation(f"chat/x/{i}", messages, "chat" if i % 2 else "code", finish)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    long = Conversation("code/long/1", (("user", "word " * 200), ("assistant", "yes it is")), "code", "stop")
    write_conversations(path, [*(talk(i) for i in range(5)), talk(7, None), talk(8, finish="length"), long])
    return path


def test_samples_equal_single_renderings_and_the_report_counts(file: Path, tokenizer: Any, tmp_path: Path) -> None:
    renderer = ChatRenderer(tokenizer, max_length=200)
    samples = prepare_samples(file, renderer, tmp_path / "cache")
    expected = [renderer.render(talk(i)) for i in range(5)] + [renderer.render(talk(8, finish="length"))]
    assert list(samples) == expected
    assert samples[-1] == expected[-1]
    assert samples[1:3] == expected[1:3]
    report = samples.report
    assert (report.conversations, report.samples, report.cut_answers) == (8, 6, 1)
    assert report.dropped == {NO_ANSWER: 1, CUT_AWAY: 1}
    assert report.by_source == {"chat": 2, "code": 4}
    assert report.tokens == sum(samples.lengths) == sum(len(s.input_ids) for s in samples)
    assert report.supervised_tokens == sum(sum(s.loss_mask) for s in samples)
    lines = "\n".join(report.lines())
    assert "8 conversations -> 6 samples" in lines
    assert f"dropped 1: {CUT_AWAY}" in lines
    assert "cut by length" in lines
    with pytest.raises(IndexError):
        samples[6]


def test_the_second_call_reads_the_cache(file: Path, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    renderer = ChatRenderer(tokenizer, max_length=200)
    first = prepare_samples(file, renderer, tmp_path / "cache")
    monkeypatch.setattr(ChatRenderer, "render_many", lambda *_: pytest.fail("rendered again"))
    second = prepare_samples(file, ChatRenderer(tokenizer, max_length=200), tmp_path / "cache")
    assert list(second) == list(first)
    assert second.report == first.report


def test_every_option_that_matters_changes_the_key(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    prepare_samples(file, ChatRenderer(make_tokenizer(CHATML)), cache)
    variants: list[tuple[ChatRenderer, int | None]] = [
        (ChatRenderer(make_tokenizer(CHATML), max_length=100), None),
        (ChatRenderer(make_tokenizer(CHATML), {"x": 1}), None),
        (ChatRenderer(make_tokenizer(CHATML), eos_token_ids=(3,)), None),
        (ChatRenderer(make_tokenizer(CHATML + " ")), None),
        (ChatRenderer(make_tokenizer(CHATML)), 3),
    ]
    for count, (renderer, limit) in enumerate(variants, start=2):
        prepare_samples(file, renderer, cache, limit=limit)
        assert len(list((cache / "samples").iterdir())) == count
    write_conversations(file, [talk(1)])
    assert len(prepare_samples(file, ChatRenderer(make_tokenizer(CHATML)), cache)) == 1


def test_a_spoilt_cache_is_made_again(file: Path, tokenizer: Any, tmp_path: Path) -> None:
    renderer = ChatRenderer(tokenizer, max_length=200)
    first = list(prepare_samples(file, renderer, tmp_path))
    (folder,) = (tmp_path / "samples").iterdir()
    for name, content in [("samples.safetensors", b"\x00"), ("samples.json", b"{}"), ("samples.json", b"{")]:
        (folder / name).write_bytes(content)
        assert load_samples(folder) is None
        assert list(prepare_samples(file, renderer, tmp_path)) == first
    assert [p.name for p in (tmp_path / "samples").iterdir()] == [folder.name]


def test_a_file_without_a_usable_sample_is_an_error(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_conversations(path, [talk(1, None), talk(2, None)])
    with pytest.raises(DataError, match=r"t\.jsonl: not one usable sample \(2 x no answer\)"):
        prepare_samples(path, ChatRenderer(tokenizer), tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        prepare_samples(tmp_path / "none.jsonl", ChatRenderer(tokenizer), tmp_path)


def test_a_set_is_a_sequence_of_samples(tokenizer: Any) -> None:
    empty = build_samples([], ChatRenderer(tokenizer))
    assert list(empty) == []
    assert empty.lengths == []
    one = build_samples([talk(1)], ChatRenderer(tokenizer))
    assert isinstance(one[0], Sample)
    assert all(isinstance(m, bool) for m in one[0].loss_mask)
