"""Samples as text, with the supervised tokens marked: green on a terminal, between « and » elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from deepspec.contracts import Sample
from deepspec.log import emit, printable

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"


def show_samples(samples: Sequence[Sample], tokenizer: Any, count: int) -> None:
    """Print the first ``count`` samples for a person."""
    color = sys.stdout.isatty()
    for sample in samples[:count]:
        emit(f"--- {printable(sample.id)}: {len(sample.input_ids)} tokens, {sum(sample.loss_mask)} supervised")
        emit(marked_text(sample, tokenizer, color=color))


def marked_text(sample: Sample, tokenizer: Any, *, color: bool) -> str:
    """Return the sample's text, special tokens spelled out, with its supervised runs marked."""
    before, after = (_GREEN, _RESET) if color else ("«", "»")
    parts = []
    for supervised, run in groupby(zip(sample.loss_mask, sample.input_ids, strict=True), key=lambda pair: pair[0]):
        text = printable(tokenizer.decode([token for _, token in run], skip_special_tokens=False))
        parts.append(f"{before}{text}{after}" if supervised else text)
    return "".join(parts)
