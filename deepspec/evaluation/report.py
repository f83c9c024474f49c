"""Write scores as JSON, Markdown, HTML and a picture. Every text from outside is escaped."""

from __future__ import annotations

import json
import math
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import deepspec
from deepspec.evaluation.markup import html_text, markdown_code, markdown_text
from deepspec.evaluation.table import notes, plain_text, side_by_side, tables
from deepspec.log import get_logger, printable

if TYPE_CHECKING:
    from deepspec.evaluation.run import Scores
    from deepspec.evaluation.table import Table

log = get_logger(__name__)

FORMAT = "deepspec-evaluation"
VERSION = 1
STYLE = (
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:75em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #bbb;padding:.2em .6em;text-align:right}td:first-child,th:first-child{text-align:left}"
    "pre{white-space:pre-wrap;background:#f4f4f4;padding:1em}"
)


def provenance() -> dict[str, str]:
    """Return the machine, the versions, the commit and the command."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit_of(Path(__file__).parents[1]),
        "command": shlex.join(getattr(sys, "orig_argv", sys.argv)),
    }


def terminal_text(scores: Scores) -> str:
    """Return what is printed at the end of an evaluation."""
    answer = scores.answer
    parts = [*(plain_text(t) for t in tables(scores)), "\n".join(notes(scores))]
    parts.append("Sample answer to: " + answer.prompt.strip())
    parts.append(side_by_side(answer.plain, answer.speculative, ("plain", "speculative")))
    return printable("\n\n".join(parts))


def write_report(folder: Path, scores: Scores, subject: dict[str, Any]) -> list[Path]:
    """Write ``report.json``, ``.md``, ``.html`` and, with matplotlib, ``.png`` into ``folder``; return their paths.

    Args:
        folder: made if it is missing.
        scores: what was measured.
        subject: what was scored: run, target, data and the like.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {name: str(value) for name, value in subject.items()}
    facts |= {"device": f"{scores.device}, {scores.precision}", **provenance()}
    record = {"format": FORMAT, "version": VERSION, "subject": facts, "scores": json_values(asdict(scores))}
    texts = {
        "report.json": json.dumps(record, indent=2, allow_nan=False) + "\n",
        "report.md": markdown(scores, facts),
        "report.html": page(scores, facts),
    }
    written = [_write(folder / name, text) for name, text in texts.items()]
    picture = _picture(folder / "report.png", scores)
    return written if picture is None else [*written, picture]


def markdown(scores: Scores, facts: dict[str, str]) -> str:
    """Return the report as Markdown."""
    parts = ["# Evaluation", "\n".join(f"- {name}: {markdown_text(value)}" for name, value in facts.items())]
    parts += [markdown_table(t) for t in tables(scores)]
    parts.append("\n".join(f"- {markdown_text(note)}" for note in notes(scores)))
    answer = scores.answer
    for name, text in (("Prompt", answer.prompt), ("Plain", answer.plain), ("Speculative", answer.speculative)):
        parts += [f"## {name}", markdown_code(text)]
    return "\n\n".join(parts) + "\n"


def page(scores: Scores, facts: dict[str, str]) -> str:
    """Return the report as an HTML page without scripts or anything loaded from elsewhere."""
    listed = "".join(f"<li>{html_text(n)}: {html_text(v)}</li>" for n, v in facts.items())
    body = ["<h1>Evaluation</h1>", f"<ul>{listed}</ul>", *(_html_table(t) for t in tables(scores))]
    body.append("<ul>" + "".join(f"<li>{html_text(note)}</li>" for note in notes(scores)) + "</ul>")
    answer = scores.answer
    for name, text in (("Prompt", answer.prompt), ("Plain", answer.plain), ("Speculative", answer.speculative)):
        body.append(f"<h2>{name}</h2><pre>{html_text(text)}</pre>")
    head = f'<meta charset="utf-8"><title>Evaluation</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def markdown_table(table: Table) -> str:
    """Return a table as a section of Markdown."""
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return f"## {markdown_text(table.title)}\n\n" + "\n".join(
        "| " + " | ".join(markdown_text(cell) if cell != "---" else cell for cell in line) + " |" for line in lines
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html_text(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(f"<td>{html_text(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<h2>{html_text(table.title)}</h2><table><tr>{head}</tr>{rows}</table>"


def _picture(path: Path, scores: Scores) -> Path | None:
    """Draw the acceptance per slot and domain; without matplotlib say how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning('no picture: matplotlib is missing, pip install "deepspec[evaluate]"')
        return None
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, acceptance in scores.acceptance.items():
        slots = [p.slot for p in acceptance.positions]
        label = f"{name.replace('$', chr(92) + '$')}: {acceptance.per_round.value:.2f}"
        axes.plot(slots, [p.rate for p in acceptance.positions], marker="o", label=label)
    axes.set(xlabel="slot of the block", ylabel="share kept, given all before", ylim=(0, 1))
    axes.set_xticks(range(1, 1 + max((len(a.positions) for a in scores.acceptance.values()), default=0)))
    axes.legend(title="accepted length per round")
    temporary = path.with_name(path.name + ".part")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return path


def _write(path: Path, text: str) -> Path:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def json_values(value: Any) -> Any:
    """Return ``value`` for JSON, with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(k): json_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def commit_of(package: Path) -> str:
    """Return the commit of the repository whose own folder ``package`` is, else the version of DeepSpec.

    An installed package may lie in somebody else's repository, whose commit says nothing about it.
    """
    top = _git(package, "rev-parse", "--show-toplevel")
    own = top is not None and Path(top).resolve() == package.resolve().parent
    commit = _git(package, "describe", "--always", "--dirty", "--abbrev=12") if own else None
    return commit or f"none, version {deepspec.__version__}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
