"""A comparison as tables, in Markdown, as JSON and for the terminal."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deepspec.checkpoint.atomic import write_json, write_text
from deepspec.evaluation.acceptance import ALL
from deepspec.evaluation.markup import markdown_text
from deepspec.evaluation.report import json_values, markdown_table, provenance
from deepspec.evaluation.table import Table, plain_text
from deepspec.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deepspec.comparison.plan import PlannedRun
    from deepspec.comparison.results import Comparison, Gain, VariantResult

FORMAT = "deepspec-comparison"
VERSION = 1
NOTHING = "-"


def save(folder: Path, comparison: Comparison, runs: Sequence[PlannedRun]) -> list[Path]:
    """Write ``comparison.json`` and ``comparison.md`` into ``folder``, each whole or not at all; return their paths."""
    facts = provenance() | comparison.made_by | {"baseline": comparison.baseline, "prompts": str(comparison.prompts)}
    record = {"format": FORMAT, "version": VERSION, "facts": facts, "runs": {run.name: list(run.train) for run in runs}}
    written = [folder / "comparison.json", folder / "comparison.md"]
    write_json(written[0], record | {"comparison": json_values(_with_verdicts(comparison))})
    write_text(written[1], markdown(comparison, facts))
    return written


def terminal_text(comparison: Comparison) -> str:
    """Return what is printed at the end of a call."""
    parts = [plain_text(table) for table in tables(comparison)]
    return printable("\n\n".join([*parts, "\n".join(_said(comparison))]))


def markdown(comparison: Comparison, facts: dict[str, str]) -> str:
    """Return the comparison as Markdown."""
    parts = [f"# Comparison: {markdown_text(comparison.study)}"]
    parts.append("\n".join(f"- {name}: {markdown_text(value)}" for name, value in facts.items()))
    parts += [markdown_table(table) for table in tables(comparison)]
    parts.append("\n".join(f"- {markdown_text(line)}" for line in _said(comparison)))
    return "\n\n".join(parts) + "\n"


def tables(comparison: Comparison) -> list[Table]:
    """Return the three tables: accepted length, acceptance by position, cost; none without a finished run."""
    variants = comparison.variants
    return [_lengths(comparison), _positions(variants), _costs(variants)] if variants else []


def verdict(gain: Gain) -> str:
    """Say whether a difference is more than chance, in the words of the table."""
    if not gain.beyond_prompts:
        return "no"
    if gain.beyond_seeds is None:
        return "yes, but for seeds"
    return "yes" if gain.beyond_seeds else "no, seeds"


def _lengths(comparison: Comparison) -> Table:
    domains = list(dict.fromkeys(name for v in comparison.variants for name in v.accepted if name != ALL))
    columns = [ALL, *domains] if len(domains) > 1 else domains
    rows = []
    for v in comparison.variants:
        accepted = [str(v.accepted[name]) if name in v.accepted else NOTHING for name in columns]
        gain = [NOTHING, NOTHING] if v.gain is None else [_signed(v.gain), verdict(v.gain)]
        by_seed = " ".join(f"{value:.2f}" for value in v.by_seed.values())
        rows.append([v.name, f"{len(v.by_seed)}/{v.seeds}", *accepted, by_seed, _number(v.spread, 3), *gain])
    head = ["variant", "runs", *columns, "by seed", "sd of seeds", f"minus {comparison.baseline}", "more than chance"]
    title = f"Accepted length per round, {comparison.prompts} prompts [95 % interval over prompts]"
    return Table(title, head, rows)


def _positions(variants: Sequence[VariantResult]) -> Table:
    longest = max((len(v.positions) for v in variants), default=0)
    rows = [
        [v.name, *(_number(p.rate, 2) for p in v.positions), *[NOTHING] * (longest - len(v.positions))]
        + [f"{v.uncensored:.2f}"]
        for v in variants
    ]
    head = ["variant", *(f"slot {n}" for n in range(1, longest + 1)), "length from slots"]
    return Table("Share of drafted tokens kept, given that all before were", head, rows)


def _costs(variants: Sequence[VariantResult]) -> Table:
    rows = [
        [
            v.name,
            f"{v.parameters / 1e6:.2f}",
            _number(v.training_minutes, 1),
            _number(v.draft_ms.value, 2) if math.isnan(v.draft_ms.value) else str(v.draft_ms),
            _number(v.speed_ratio.value, 2) if math.isnan(v.speed_ratio.value) else str(v.speed_ratio),
        ]
        for v in variants
    ]
    head = ["variant", "trained parameters, M", "training, min", "drafting a block, ms", "tokens/s vs plain"]
    return Table("Cost, medians over timed prompts [95 % interval]", head, rows)


def _said(comparison: Comparison) -> list[str]:
    lines = [f"{run}: {reason}" for run, reason in comparison.missing.items()]
    lines += comparison.notes
    if comparison.variants and all(v.spread is None for v in comparison.variants):
        lines.append("No variant has several seeds yet: what chance does to the training is not known")
    return lines


def _signed(gain: Gain) -> str:
    d = gain.difference
    return f"{d.value:+.2f} [{d.low:+.2f}, {d.high:+.2f}]"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _with_verdicts(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain values, each variant with what the table says of its gain."""
    values = asdict(comparison)
    for plain, variant in zip(values["variants"], comparison.variants, strict=True):
        plain["more_than_chance"] = None if variant.gain is None else verdict(variant.gain)
    return values
