"""Scores as tables of plain text cells, for the terminal, Markdown and HTML alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspec.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.evaluation.run import Scores


@dataclass(frozen=True)
class Table:
    """A title, a head and rows of text."""

    title: str
    head: list[str]
    rows: list[list[str]]


def tables(scores: Scores) -> list[Table]:
    """Return the tables of a report."""
    found = [_acceptance(scores)]
    if scores.speed:
        found.append(_speed(scores))
    return found


def plain_text(table: Table) -> str:
    """Align a table for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.head))]
    text = ["  ".join(_pad(cell, w, i) for i, (cell, w) in enumerate(zip(line, widths, strict=True))) for line in lines]
    return "\n".join([table.title, *(line.rstrip() for line in text)])


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


def notes(scores: Scores) -> list[str]:
    """Return what has to be said beside the tables."""
    said = [
        f"Expected accepted length when sampling at temperature 1 along the same texts: {scores.expected_length:.2f}, "
        "over blocks that the end of a text does not cut",
        "Slot n: share of drafted tokens kept at place n of a block, given that all before were. Accepted length "
        "counts tokens per forward pass of the target; rounds cut by the end of a text count as they are, except in "
        "the column without them, which follows from the slots.",
    ]
    if scores.draft is not None:
        draft = scores.draft
        said.append(
            f"Drafting one block: {draft.milliseconds} ms, median over prompts and {draft.blocks} whole blocks; "
            "neither the text before it nor the target counts"
        )
    if scores.gain is not None:
        said.append(f"Accepted length above prompt lookup, paired by prompt: {scores.gain}")
    report = scores.lossless
    if report is not None:
        said.append(
            f"Greedy output against plain decoding: {report.equal} of {report.prompts} texts equal token for token, "
            f"{len(report.ties)} differ by a tie of logits, {len(report.differing)} differ"
        )
        said += [f"DIFFERS: {d.prompt_id} at token {d.index}, logit gap {d.logit_gap:.2g}" for d in report.differing]
    elif scores.lookup:  # the texts are there
        said.append(
            f"Greedy output was not compared with plain decoding: in {scores.precision} the order of close logits "
            "depends on how many rows a product has; with target.dtype=fp32 it is"
        )
    return said


def _acceptance(scores: Scores) -> Table:
    longest = max((len(a.positions) for a in scores.acceptance.values()), default=0)
    slots = [f"slot {n}" for n in range(1, longest + 1)]
    rows = []
    for name, a in scores.acceptance.items():
        rates = [f"{p.rate:.2f}" for p in a.positions]
        lookup = f"{scores.lookup[name].per_round.value:.2f}" if name in scores.lookup else "-"
        rows.append(
            [name, str(a.prompts), str(a.rounds), str(a.per_round), str(a.per_request), f"{a.uncensored:.2f}", lookup]
            + rates
            + ["-"] * (len(slots) - len(rates))
        )
    how = "greedy" if scores.temperature == 0 else f"temperature {scores.temperature:g}"
    title = f"Accepted length, gamma {scores.gamma}, {how}, at most {scores.max_new_tokens} new tokens [95 % interval]"
    head = ["domain", "prompts", "rounds", "per round", "per request", "without cut rounds", "prompt lookup", *slots]
    return Table(title, head, rows)


def _speed(scores: Scores) -> Table:
    prompts = len(scores.speed[0].per_prompt)
    where = f"{scores.timing_threads} thread(s)" if scores.device == "cpu" else scores.device
    title = (
        f"Speed, {prompts} prompts, at most {scores.timing_new_tokens} new tokens, {where}, "
        "medians over prompts and of ratios of pairs [95 % interval]"
    )
    head = ["decoder", "tokens/s", "vs plain", "after prefill", "vs plain", "accepted length"]
    rows = [
        [
            s.name,
            f"{s.tokens_per_second.value:.1f}",
            str(s.ratio),
            f"{s.decode_tokens_per_second.value:.1f}",
            str(s.decode_ratio),
            f"{s.accepted_length:.2f}",
        ]
        for s in scores.speed
    ]
    return Table(title, head, rows)


def side_by_side(left: str, right: str, titles: Sequence[str], width: int = 58) -> str:
    """Set two texts beside each other."""
    columns = [_wrapped(printable(text), width) for text in (left, right)]
    height = max(len(c) for c in columns)
    padded = [c + [""] * (height - len(c)) for c in columns]
    lines = [f"{titles[0]:<{width}} | {titles[1]}", "-" * width + "-+-" + "-" * width]
    lines += [f"{a:<{width}} | {b}" for a, b in zip(*padded, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    lines: list[str] = []
    for line in text.expandtabs(4).splitlines() or [""]:
        lines += textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False) or [""]
    return lines
