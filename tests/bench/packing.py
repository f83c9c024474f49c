"""Tokens a second of training on packed rows, against random batches padded to their longest.

    python -m tests.bench.packing          # minutes on two cores; needs the quickstart's target
    python -m tests.bench.packing --quick  # a tiny target: does the code still run

Both see the same samples and anchors under the same budget of tokens a micro-batch: features of the target, forward,
loss and backward. If cost were proportional to tokens, a batch without padding would be 1 / (1 - padding share) times
as fast as the padded ones; "reached" says how much of that packing gives. Ratios are of pairs that ran one after the
other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepspec.config.compose import compose_run
from deepspec.contracts import Sample
from deepspec.data.collate import LENGTH_STEP
from deepspec.data.loader import BatchMaker
from deepspec.data.sampler import BatchPlan, Entry, Row
from deepspec.engine.loop import normalised_loss
from deepspec.features.online import OnlineFeatures
from deepspec.log import emit
from deepspec.targets.load import layer_ids, load_target
from tests.bench import common
from tests.helpers import tiny_target
from tests.unit.drafters.small import drafter as small_drafter

if TYPE_CHECKING:
    from deepspec.contracts import Batch
    from deepspec.targets.target import Target

PROMPT = 24  # tokens that are not supervised
COLUMNS = ("budget", "padding share", "padded, s", "packed, s", "times as fast [min, max]", "at most", "reached")


def padded_rows(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[list[Row]]:
    """Cut ``order`` into micro-batches of one sample a row, of at most ``budget`` tokens with their padding."""
    batches: list[list[Row]] = [[]]
    longest = 0
    for index in order:
        own = -(-lengths[index] // LENGTH_STEP) * LENGTH_STEP
        longest = max(longest, own)
        if longest * (len(batches[-1]) + 1) > budget and batches[-1]:
            batches.append([])
            longest = own
        batches[-1].append((Entry(index, 0),))
    return batches


def gradient(drafter: Any, source: OnlineFeatures, batches: Sequence[Batch]) -> None:
    """Form the gradient of all batches."""
    drafter.zero_grad()
    for batch in batches:
        output = drafter(batch, source(batch))
        normalised_loss(output.sums, drafter.coefficients, drafter.denominators(batch)).backward()


def conversations(count: int, longest: int, vocab: int) -> list[Sample]:
    """Return samples of random tokens whose lengths spread as those of conversations do, log-normally around 150."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(150), 0.8, count)), PROMPT, longest).astype(int)
    return [
        Sample(f"s{i}", tuple(rng.integers(0, vocab - 1, n).tolist()), tuple(j >= PROMPT for j in range(n)))
        for i, n in enumerate(lengths)
    ]


def pair(arguments: Any, device: torch.device) -> tuple[Target, Any] | None:
    """Return the quickstart's target and drafter, or tiny ones; None, with a line, where the target is not there."""
    if arguments.quick:
        tiny = tiny_target()
        made: Any = small_drafter(info=tiny.info)
        made.bind(tiny.head)
        return tiny, made
    cfg = compose_run(["recipe=quickstart", "drafter.init=random"], check_files=False)
    if not Path(cfg.target.path).is_dir():
        emit(f"packing not measured: {cfg.target.path} is not there; python -m deepspec.prepare recipe=quickstart")
        return None
    target = load_target(cfg.target, device)
    drafter = cfg.drafter.build(target.info, layer_ids(cfg.target, target.info.num_layers), cfg.target.mask_token_id)
    drafter.bind(target.head)
    drafter.set_vocabulary(range(len(drafter.d2t)))
    return target, drafter.to(device)


def both_sides(make: BatchMaker, budget: int, device: torch.device) -> tuple[list[Batch], list[Batch]]:
    """Return the same samples as padded and as packed micro-batches of at most ``budget`` tokens."""
    lengths = [len(sample.input_ids) for sample in make.samples]
    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    plan = BatchPlan(lengths, global_batch_size=len(lengths), micro_batch_size=1, row_tokens=budget)
    padded, packed = padded_rows(lengths, order, budget), plan.micro_batches(0)
    return [make(rows).to(device) for rows in padded], [make(rows).to(device) for rows in packed]


def compare(drafter: Any, source: OnlineFeatures, make: BatchMaker, budget: int, repeats: int) -> list[str]:
    """Return a row of the table."""
    device = source.target.device
    padded, packed = both_sides(make, budget, device)
    tokens = sum(len(sample.input_ids) for sample in make.samples)
    share = 1.0 - tokens / sum(batch.input_ids.numel() for batch in padded)
    sides = [partial(gradient, drafter, source, batches) for batches in (padded, packed)]
    seconds = [[common.seconds_of(side, device) for side in sides] for _ in range(repeats + 1)]
    del seconds[0]  # warmed up
    ratios = [slow / fast for slow, fast in seconds]
    ratio, limit = statistics.median(ratios), 1.0 / (1.0 - share)
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    return [
        str(budget), f"{share:.0%}", *(f"{x:.2f}" for x in medians),
        f"{ratio:.2f} [{min(ratios):.2f}, {max(ratios):.2f}]", f"{limit:.2f}", f"{ratio / limit:.0%}",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--anchor-share", type=float, default=0.1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.samples, arguments.budgets, arguments.repeats, arguments.device = 6, [256], 1, "cpu"
    device = common.choose_device(arguments.device)
    found = pair(arguments, device)
    if found is None:
        return
    target, drafter = found
    source = OnlineFeatures(target, drafter.taps)
    common.emit_header("tests.bench.packing", device, argv)
    emit(
        f"{target.info.name}; {arguments.samples} samples, anchors {arguments.anchor_share:.0%} of what is supervised\n"
    )
    common.emit_columns(COLUMNS)
    for budget in arguments.budgets:
        samples = conversations(arguments.samples, budget, target.info.vocab_size)
        make = BatchMaker(samples, seed=0, anchors_per_sample=budget, anchor_share=arguments.anchor_share)
        common.emit_row(compare(drafter, source, make, budget, arguments.repeats))


if __name__ == "__main__":
    main()
