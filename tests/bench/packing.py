"""Tokens a second of training on packed rows, against random batches padded to their longest.

    python -m tests.bench.packing          # a few minutes on two cores; needs the quickstart's target

Both see the same samples and anchors under the same budget of tokens a micro-batch: features of the target, forward,
loss and backward. If cost were proportional to tokens, a batch without padding would be 1 / (1 - padding share) times
as fast as the padded ones; "reached" says how much of that packing gives. Ratios are of pairs that ran one after the
other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepspec.config.compose import compose_run
from deepspec.contracts import Sample
from deepspec.data.loader import BatchMaker
from deepspec.data.sampler import BatchPlan, Entry, Row
from deepspec.engine.distributed import joined_ranks
from deepspec.engine.loop import normalised_loss
from deepspec.features.online import OnlineFeatures
from deepspec.targets.load import layer_ids, load_target

if TYPE_CHECKING:
    from deepspec.contracts import Batch

PROMPT = 24  # tokens that are not supervised


def padded_rows(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[list[Row]]:
    """Cut ``order`` into micro-batches of one sample a row, of at most ``budget`` tokens with their padding."""
    batches: list[list[Row]] = [[]]
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if longest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append((Entry(index, 0),))
    return batches


def run(drafter: Any, source: OnlineFeatures, batches: Sequence[Batch]) -> float:
    """Return the seconds that the gradient of all batches takes."""
    drafter.zero_grad()
    start = time.perf_counter()
    for batch in batches:
        output = drafter(batch, source(batch))
        normalised_loss(output.sums, drafter.coefficients, drafter.denominators(batch)).backward()
    return time.perf_counter() - start


def conversations(count: int, longest: int, vocab: int) -> list[Sample]:
    """Return samples of random tokens whose lengths spread as those of conversations do, log-normally around 150."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(150), 0.8, count)), 24, longest).astype(int)
    return [
        Sample(f"s{i}", tuple(rng.integers(0, vocab - 1, n).tolist()), tuple(j >= PROMPT for j in range(n)))
        for i, n in enumerate(lengths)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--anchor-share", type=float, default=0.1)
    parser.add_argument("overrides", nargs="*", default=[], help="of the recipe quickstart, such as target=path")
    arguments = parser.parse_args()
    cfg = compose_run(["recipe=quickstart", "drafter.init=random", *arguments.overrides])
    with joined_ranks(cfg.engine) as ranks:
        target = load_target(cfg.target, ranks.device)
        taps = layer_ids(cfg.target, target.info.num_layers)
        drafter = cfg.drafter.build(target.info, taps, cfg.target.mask_token_id)
        drafter.bind(target.head)
        if drafter.d2t is not None:
            drafter.set_vocabulary(range(len(drafter.d2t)))
        drafter.to(ranks.device)
        source = OnlineFeatures(target, drafter.taps)
        say = sys.stdout.write
        say(f"{ranks.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, ")
        say(f"{arguments.samples} samples, anchors {arguments.anchor_share:.0%}, medians of {arguments.repeats}\n\n")
        columns = ("budget", "padding share", "padded, s", "packed, s", "times as fast", "at most", "reached")
        say(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
        for budget in arguments.budgets:
            samples = conversations(arguments.samples, budget, target.info.vocab_size)
            share = arguments.anchor_share
            make = BatchMaker(samples, seed=0, anchors_per_sample=budget, anchor_share=share)
            say("| " + " | ".join(compare(drafter, source, make, budget, arguments.repeats)) + " |\n")


def compare(drafter: Any, source: OnlineFeatures, make: BatchMaker, budget: int, repeats: int) -> list[str]:
    """Return a row of the table."""
    device, lengths = source.target.device, [len(sample.input_ids) for sample in make.samples]
    plan = BatchPlan(lengths, global_batch_size=len(lengths), micro_batch_size=1, row_tokens=budget)
    packed = [make(rows).to(device) for rows in plan.micro_batches(0)]
    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    padded = [make(rows).to(device) for rows in padded_rows(lengths, order, budget)]
    share = 1.0 - sum(lengths) / sum(batch.input_ids.numel() for batch in padded)
    seconds = [(run(drafter, source, padded), run(drafter, source, packed)) for _ in range(repeats + 1)][1:]
    ratios = [slow / fast for slow, fast in seconds]
    ratio, limit = statistics.median(ratios), 1.0 / (1.0 - share)
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    return [
        str(budget), f"{share:.0%}", *(f"{x:.2f}" for x in medians),
        f"{ratio:.2f} [{min(ratios):.2f}, {max(ratios):.2f}]", f"{limit:.2f}", f"{ratio / limit:.0%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
