"""The card beside a server layout: what it is, who loads it, what was measured, and the commands that serve it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import deepspec
from deepspec.evaluation.markup import markdown_text
from deepspec.export.card import Origin
from deepspec.export.layouts.serving import Command, read_served, sglang, vllm
from deepspec.export.table import table
from deepspec.export.verify import verification_rows
from deepspec.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.export.conformance.check import Report
    from deepspec.export.layouts.common import LayoutFiles, Source
    from deepspec.export.verify import Verification

VERIFY_HEAD = ("", "trained drafter", "this folder", "change")
QUANTISED = {"none": "", "w8a8": "INT8, activations too", "w8a16": "INT8, packed"}
FOLDER = "FOLDER"
NOT_RUN = """No server was started for this folder. What is said about each consumer comes from tables of the names,
shapes, types and keys that its loader reads; the commands are marked by whether they were run.
"""
SCRIPTS = """`launch/serve_vllm.sh FOLDER` and `launch/serve_sglang.sh FOLDER` read the commands out of the config;
`--dry-run` prints them.
"""
LOAD_PUBLISHED = (
    "python eval.py --target_name_or_path {target} --draft_name_or_path FOLDER --temperature 1.0 "
    "--confidence-threshold 0.0"
)


def card_text(
    source: Source,
    files: LayoutFiles,
    reports: Sequence[Report],
    verification: Verification,
    origin: Origin,
    *,
    forced: bool,
) -> str:
    """Return the card as Markdown."""
    parts = [f"# Drafter for {markdown_text(source.target.name)}, layout {files.layout}\n"]
    if forced:
        parts.append("**Written by force although it failed its verification:**\n\n" + _bullets(verification.problems))
    parts += [
        _facts(source, files, origin),
        "## Who loads it\n",
        NOT_RUN,
        table(("consumer", "", "remarks"), [_row(report) for report in reports]),
        "## Against the trained drafter\n",
        table(VERIFY_HEAD, verification_rows(verification)),
        "The folder was read back from disk, every tensor as it is stored"
        + (", and activations were rounded per token as the server does.\n" if _rounds(source) else ".\n"),
        "## How to serve\n",
        *_commands(source, files, reports),
    ]
    return "\n".join(parts)


def report_text(reports: Sequence[Report], verification: Verification) -> str:
    """Return the tables for the terminal."""
    return (
        table(VERIFY_HEAD, verification_rows(verification))
        + "\n"
        + table(("consumer", "", "remarks"), [_row(report) for report in reports])
    )


def _rounds(source: Source) -> bool:
    return source.numbers.quantisation == "w8a8"


def _row(report: Report) -> tuple[str, str, str]:
    remarks = [*report.problems, *report.warnings]
    text = "; ".join(remark.removeprefix(f"{report.consumer.title}: ") for remark in remarks)
    return report.consumer.title, "conforms" if report.conforms else "cannot load it", markdown_text(text)


def _facts(source: Source, files: LayoutFiles, origin: Origin) -> str:
    conventions, folded = source.drafter.conventions, source.temperature
    facts = {
        "target": ", ".join(markdown_text(t) for t in (source.target.name, source.target.model_type) if t),
        "target's fingerprint": markdown_text(source.target.fingerprint),
        "recipe": markdown_text(origin.recipe),
        "data": markdown_text(origin.data),
        "optimiser steps": "" if origin.step is None else str(origin.step),
        "drafted tokens (gamma)": str(conventions.gamma),
        "block layout": conventions.block_layout,
        "tapped layers": ", ".join(map(str, conventions.target_layer_ids))
        + " (outputs, counted from 0; other keys of the config count as their readers do)",
        "type": source.numbers.dtype_name + ", the one the target is served in",
        "linears of the layers": QUANTISED[source.numbers.quantisation],
        "embedding and head": "copies of the target's are in the folder" if source.include_embeddings else "",
        "confidence": f"log-odds divided by {folded:g}; do not calibrate again" if folded != 1.0 else "",
        "more files": ", ".join(files.extras),
        "DeepSpec": deepspec.__version__,
    }
    return _bullets([f"{key}: {value}" for key, value in facts.items() if value])


def _commands(source: Source, files: LayoutFiles, reports: Sequence[Report]) -> list[str]:
    """Return a block for each consumer that can load the folder."""
    target = " ".join(printable(source.verifier or source.target.name).split())
    able = {report.consumer.name for report in reports if report.conforms}
    found = []
    if able & {"vllm", "sglang"}:
        served = read_served(files.config)
        if "vllm" in able:
            found.append(_block("vLLM", vllm(FOLDER, served, target, [])))
        if "sglang" in able and not served.speculators:
            found.append(_block("SGLang", sglang(FOLDER, served, target, [], files=frozenset(files.extras))))
        found.append(SCRIPTS)
    if "speculators" in able:
        found.append(
            "speculators (not run):\n\n    from speculators import SpeculatorModel\n"
            "    model = SpeculatorModel.from_pretrained(FOLDER)\n"
        )
    if "published_eval" in able:
        command = LOAD_PUBLISHED.format(target=shlex.quote(target))
        found.append(f"The published evaluation code (not run):\n\n    {command}\n")
    return found or ["No server that was verified reads this layout (docs/serving.md).\n"]


def _block(title: str, command: Command) -> str:
    return f"{title} (not run):\n\n    {command}\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"
