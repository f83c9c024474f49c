"""Packages of the same drafter, decoded in turn with the same prompts.

    python -m tests.bench.packages TARGET runs/quickstart/package-bf16 runs/quickstart/package-fp16_int8
    python -m tests.bench.packages --dtype bf16 TARGET PACKAGE ...   # with the target, and the drafter, in bf16

One pinned thread; the order rotates from prompt to prompt, and ratios are medians of pairs: the same prompt, moments
apart. `draft ms` is a whole block, without the target; `times as fast` compares with the first package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspec.evaluation.acceptance import Prompt
from deepspec.evaluation.run import spread
from deepspec.evaluation.speed import BASELINE, ClockedProposer, compare, draft_time, measure
from deepspec.evaluation.statistics import bootstrap_median, resample
from deepspec.inference.accelerate import accelerate
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.open_target import chat_ids, open_target, stop_ids
from deepspec.inference.package import load_package
from deepspec.inference.proposers import DrafterProposer, PlainProposer
from deepspec.targets.target import Target
from tests.bench import common

PROMPTS = common.ROOT / "data" / "quickstart" / "test.jsonl"
COLUMNS = (
    "package", "draft ms [95 %]", "times as fast [95 %]", "tokens/s [95 %]", "times as fast [95 %]", "accepted length"
)  # fmt: skip
RESAMPLES = 2000


def read_prompts(path: Path, target: Target, count: int) -> list[Prompt]:
    """Return ``count`` first questions of a file of conversations, evenly spread over it."""
    conversations = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    prompts = [Prompt(c["id"], c["id"].split("/")[0], chat_ids(target, c["messages"][:1], {})) for c in conversations]
    return spread(prompts, count)


def ratios(reference: Sequence[float], values: Sequence[float], draws: torch.Tensor) -> str:
    """Return the median over pairs of reference / value with its interval."""
    return str(bootstrap_median([a / b for a, b in zip(reference, values, strict=True)], draws))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table; return each package's milliseconds a block, by prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder or hub id")
    parser.add_argument("packages", nargs="+", type=Path, help="folders; the others are compared with the first")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the computation")
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--data", type=Path, default=PROMPTS, help="conversations whose first questions are asked")
    arguments = parser.parse_args(argv)
    target = open_target(arguments.target, torch.device("cpu"), arguments.dtype)
    prompts = read_prompts(arguments.data, target, arguments.prompts)
    clocked: dict[str, ClockedProposer] = {}
    for folder in arguments.packages:
        drafter = load_package(folder, target)
        accelerate(target, drafter)
        clocked[folder.name] = ClockedProposer(DrafterProposer(drafter), target.device)
    common.emit_header("tests.bench.packages", target.device, argv)
    decoders = {name: SpeculativeDecoder(target, proposer) for name, proposer in clocked.items()}
    runs = measure(
        {BASELINE: SpeculativeDecoder(target, PlainProposer())} | decoders,
        prompts,
        arguments.tokens,
        stop_ids=stop_ids(target),
    )
    speeds = {speed.name: speed for speed in compare(runs, resamples=RESAMPLES)}
    drafts = {name: draft_time(p.seconds()[1:], resamples=RESAMPLES, seed=0) for name, p in clocked.items()}
    first, draws = next(iter(clocked)), resample(len(prompts), RESAMPLES, 0)
    common.emit_columns(COLUMNS)
    common.emit_row([BASELINE, "", "", str(speeds[BASELINE].tokens_per_second), "", "1"])
    for name, drafted in drafts.items():
        speed, reference = speeds[name], drafts[first]
        if drafted is None or reference is None:
            raise SystemExit(f"{name}: no answer of {arguments.tokens} tokens holds a whole block: raise --tokens")
        whole = "" if name == first else ratios(speed.per_prompt, speeds[first].per_prompt, draws)
        block = "" if name == first else ratios(reference.per_prompt, drafted.per_prompt, draws)
        accepted = f"{speed.accepted_length:.2f}"
        common.emit_row([name, str(drafted.milliseconds), block, str(speed.tokens_per_second), whole, accepted])
    return {name: drafted.per_prompt for name, drafted in drafts.items() if drafted is not None}


if __name__ == "__main__":
    main()
