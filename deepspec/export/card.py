"""The card of a package: what it is, what was measured, and how to use it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

import deepspec
from deepspec.evaluation.markup import markdown_text
from deepspec.export.certificate import CERTIFICATE_HEAD, certificate_rows
from deepspec.export.sizes import SIZE_HEAD, size_rows
from deepspec.export.verify import verification_rows
from deepspec.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.export.sizes import PartSize
    from deepspec.export.verify import Verification
    from deepspec.inference.package_config import PackageConfig
    from deepspec.inference.profiles import QuantisedGroup

VERIFICATION_NOTE = """Both drafters, the trained one in fp32 and this package as reloaded from disk, drafted for
the same target, prompts and tokens. The accepted length is pooled over rounds; rounds cut by the end of the text are
left out. The total variation between the two drafters' distributions bounds the change of a slot's acceptance.
"""
CERTIFICATE_NOTE = """The accepted length that whole blocks promise at temperature 1 along test conversations, for
both drafters on the same blocks; the interval is that of the change, samples drawn with replacement. A package is
refused where its upper end exceeds `export.max_length_change` on any domain. AUC and Brier score of the confidence head
are against the acceptance of its own drafter, first the trained one's, then the package's.
"""
REDUCED_NOTE = """
The draft vocabulary is reduced: the drafter proposes only the tokens that the tensor `d2t` names (target id =
draft id + d2t[draft id]); the target may still answer any token. Other software: vLLM needs, beside `d2t`, a tensor
`lm_head.weight` with those rows of the target's head, which is not stored here; SGLang's DSpark has no reduced
vocabulary.
"""
VERIFY_HEAD = ("", "trained drafter", "package", "change")


@dataclass(frozen=True)
class Origin:
    """Where a drafter comes from, in words for the card."""

    recipe: str = ""
    data: str = ""
    step: int | None = None
    target_path: str = ""


def card_text(
    config: PackageConfig, verification: Verification, sizes: Sequence[PartSize], origin: Origin, *, forced: bool
) -> str:
    """Return the card as Markdown."""
    parts = [f"# Drafter for {markdown_text(config.target.name)}, {config.profile}\n"]
    if forced:
        parts.append(
            "**Written by force although it failed its verification:**\n\n"
            + _bullets([markdown_text(problem) for problem in verification.problems])
        )
    parts += [
        _facts(config, origin),
        "## Against the trained drafter\n",
        table(VERIFY_HEAD, verification_rows(verification)),
        VERIFICATION_NOTE,
        "## Certificate\n",
        table(CERTIFICATE_HEAD, _certificate_rows(verification)),
        CERTIFICATE_NOTE,
    ]
    parts += ["## Size\n", table(SIZE_HEAD, _size_rows(config, sizes)), _usage(config, origin)]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are aligned for reading as plain text too."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def report_text(config: PackageConfig, verification: Verification, sizes: Sequence[PartSize]) -> str:
    """Return the tables for the terminal."""
    tables = (
        (VERIFY_HEAD, verification_rows(verification)),
        (CERTIFICATE_HEAD, _certificate_rows(verification)),
        (SIZE_HEAD, _size_rows(config, sizes)),
    )
    return "\n".join(table(head, rows) for head, rows in tables)


def _certificate_rows(verification: Verification) -> list[tuple[str, ...]]:
    """Return the certificate's rows; a domain's name comes from the data."""
    return [(markdown_text(domain), *rest) for domain, *rest in certificate_rows(verification.domains)]


def _facts(config: PackageConfig, origin: Origin) -> str:
    window = "none" if config.sliding_window is None else str(config.sliding_window)
    facts = {
        "target": ", ".join(markdown_text(t) for t in (config.target.name, config.target.model_type) if t),
        "target's fingerprint": markdown_text(config.target.fingerprint),
        "recipe": markdown_text(origin.recipe),
        "data": markdown_text(origin.data),
        "optimiser steps": "" if origin.step is None else str(origin.step),
        "drafted tokens (gamma)": str(config.gamma),
        "block layout": config.block_layout,
        "target layers": ", ".join(map(str, config.target_layer_ids)),
        "mask token": str(config.mask_token_id),
        "chat template's options": markdown_text(json.dumps(config.template_options))
        if config.template_options
        else "",
        "sliding window": window,
        "draft vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} tokens" if _is_reduced(config) else "",
        "number formats": _formats(config),
        "kept in bf16": markdown_text(", ".join(config.bfloat16.tensors)),
        "states beyond fp16": markdown_text(", ".join(config.bfloat16.states)),
        "DeepSpec": deepspec.__version__,
    }
    return _bullets([f"{key}: {value}" for key, value in facts.items() if value])


def _formats(config: PackageConfig) -> str:
    """Say how each part is stored."""
    return "; ".join(
        [f"{part}: {_scheme(group)}" for part, group in config.quantisation.items()] + [f"all else: {config.dtype}"]
    )


def _scheme(group: QuantisedGroup) -> str:
    columns = "" if group.group is None else f" of {group.group} columns"
    rounded = ", activations rounded to INT8 token by token" if group.activations == "int8_per_token" else ""
    return f"{markdown_text(group.scheme)}{columns}{rounded}"


def _size_rows(config: PackageConfig, sizes: Sequence[PartSize]) -> list[tuple[str, ...]]:
    return size_rows(list(sizes), config.vocab_size, config.hidden_size)


def _usage(config: PackageConfig, origin: Origin) -> str:
    target = shlex.quote(" ".join(printable(origin.target_path or config.target.name).split()))
    return (
        "## How to load\n\n"
        "The target's embedding and head are not stored here; the drafter uses the target's own.\n\n"
        f'    python -m deepspec.inference PACKAGE --target {target} --prompt "..."\n\n'
        "    from deepspec.inference.package import load_package\n"
        "    drafter = load_package(PACKAGE, target)  # a deepspec.targets Target\n"
    ) + (REDUCED_NOTE if _is_reduced(config) else "")


def _is_reduced(config: PackageConfig) -> bool:
    return config.draft_vocab_size < config.vocab_size


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"
