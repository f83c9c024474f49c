"""The card of a package: what it is, what was measured, and how to use it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import deepspec
from deepspec.evaluation.markup import markdown_text
from deepspec.evaluation.report import commit_of
from deepspec.export.calibration_table import CALIBRATION_HEAD, calibration_parts, calibration_rows
from deepspec.export.certificate import CERTIFICATE_HEAD, certificate_rows
from deepspec.export.sizes import SIZE_HEAD, size_rows
from deepspec.export.table import table
from deepspec.export.verify import verification_rows
from deepspec.log import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.export.calibrate import Calibrated
    from deepspec.export.sizes import PartSize
    from deepspec.export.verify import Verification
    from deepspec.inference.calibration import Calibration
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
    revision: str = ""
    """Of the target, where it is a hub id and not the default branch."""


def card_text(
    config: PackageConfig,
    verification: Verification,
    sizes: Sequence[PartSize],
    origin: Origin,
    *,
    forced: bool,
    calibrated: Calibrated | None = None,
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
    if calibrated is not None:
        parts += calibration_parts(calibrated)
    parts += ["## Size\n", table(SIZE_HEAD, _size_rows(config, sizes)), _usage(config, origin)]
    return "\n".join(parts)


def report_text(
    config: PackageConfig,
    verification: Verification,
    sizes: Sequence[PartSize],
    calibration: Calibration | None = None,
) -> str:
    """Return the tables for the terminal."""
    tables: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        (VERIFY_HEAD, verification_rows(verification)),
        (CERTIFICATE_HEAD, _certificate_rows(verification)),
        (SIZE_HEAD, _size_rows(config, sizes)),
    ]
    if calibration is not None:
        tables.insert(2, (CALIBRATION_HEAD, calibration_rows(calibration)))
    return "\n".join(table(head, rows) for head, rows in tables)


def _certificate_rows(verification: Verification) -> list[tuple[str, ...]]:
    """Return the certificate's rows; a domain's name comes from the data."""
    return [(markdown_text(domain), *rest) for domain, *rest in certificate_rows(verification.domains)]


def _facts(config: PackageConfig, origin: Origin) -> str:
    window = "none" if config.sliding_window is None else str(config.sliding_window)
    facts = {
        "target": ", ".join(markdown_text(t) for t in (config.target.name, config.target.model_type) if t),
        "target's revision": markdown_text(origin.revision),
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
        "confidence": _confidence(config),
        "DeepSpec": deepspec.__version__,
        "commit": commit_of(Path(deepspec.__file__).parent),
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


def _confidence(config: PackageConfig) -> str:
    return f"calibrated, temperatures in {config.calibration}" if config.calibration else "not calibrated"


def _size_rows(config: PackageConfig, sizes: Sequence[PartSize]) -> list[tuple[str, ...]]:
    return size_rows(list(sizes), config.vocab_size, config.hidden_size)


def _usage(config: PackageConfig, origin: Origin) -> str:
    path = " ".join(printable(origin.target_path or config.target.name).split())
    target = shlex.quote(path)
    copies = "copies of them are here for other software" if config.stored_embeddings else "they are not stored here"
    return (
        "## How to load\n\n"
        f"The drafter uses the target's own embedding and head; {copies}.\n\n"
        f'    python -m deepspec.inference PACKAGE --target {target} --prompt "..."\n\n'
        "    from deepspec.inference.api import load\n"
        f'    model = load("PACKAGE", {json.dumps(path)})\n'
        '    for piece in model.stream("..."):\n'
        "        ...\n\n"
        "This folder is for DeepSpec's own decoder, which needs torch, transformers and safetensors. Servers have\n"
        "layouts of their own: `python -m deepspec.export run=... export.layout=universal` (vLLM, SGLang) and others.\n"
    ) + (REDUCED_NOTE if _is_reduced(config) else "")


def _is_reduced(config: PackageConfig) -> bool:
    return config.draft_vocab_size < config.vocab_size


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines) + "\n"
