"""What ``prepare`` prints about the data: each split, and how far the test split is from the training split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deepspec.data.conversations import read_conversations, without_answer
from deepspec.data.samples import SampleSet
from deepspec.data.similarity import compare_prompts, repeated_ngram_share
from deepspec.data.splits import shared_families
from deepspec.errors import DataError
from deepspec.log import printable


def prepared_lines(files: Mapping[str, Path], samples: Mapping[str, SampleSet], limit: int | None = None) -> list[str]:
    """Return the whole report: each split, repetition in the test split, distance of test and train."""
    lines = [line for name in files for line in split_lines(name, files[name], samples[name])]
    if "test" in samples:
        lines.append("test: " + repetition_line(samples["test"]))
    return [printable(line) for line in [*lines, *separation_lines(files, limit)]]  # names come from the files


def split_lines(name: str, file: Path, samples: SampleSet) -> list[str]:
    """Return the report of one split; every line but the first is indented."""
    return [f"{name}: {file}", *(f"  {line}" for line in samples.report.lines())]


def repetition_line(samples: SampleSet) -> str:
    """Return the share of supervised tokens in repeated 8-grams, over all samples and inside each one."""
    answers = [[t for t, m in zip(s.input_ids, s.loss_mask, strict=True) if m] for s in samples]
    total = sum(map(len, answers))
    inside = sum(repeated_ngram_share([tokens]) * len(tokens) for tokens in answers) / total if total else 0.0
    return (
        f"supervised tokens in repeated 8-grams: {repeated_ngram_share(answers):.1%} "
        f"({inside:.1%} when each answer is looked at by itself)"
    )


def separation_lines(files: Mapping[str, Path], limit: int | None = None) -> list[str]:
    """Say which families stand in two splits, and how near the test prompts are to the training prompts."""
    prompts = {name: _prompts(file, limit) for name, file in files.items()}
    shared = shared_families(prompts)
    lines = [f"template families in more than one split: {len(shared)} {', '.join(list(shared)[:5])}".rstrip()]
    if "test" not in prompts or "train" not in prompts:
        return lines
    try:
        report = compare_prompts(prompts["test"], prompts["train"])
    except DataError as error:
        return [*lines, f"test/train similarity: not measured ({error})"]
    return [*lines, report.line(), *(f"  {p.similarity:.2f}: {p.test_id} and {p.train_id}" for p in report.above)]


def _prompts(file: Path, limit: int | None) -> dict[str, str]:
    """Return id -> the text of the messages before the last answer, without system messages."""
    return {
        c.id: "\n".join(text for role, text in without_answer(c).messages if role != "system")
        for c in read_conversations(file, limit)
    }
