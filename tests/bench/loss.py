"""Time and memory of the draft loss: the obvious eager code, as published code has it, against the one-pass loss.

    python -m tests.bench.loss                        # minutes on two cores
    python -m tests.bench.loss --rows 256 1024 3584 --vocab 151936 --width 2560

Each measurement runs in a process of its own, value and gradient, the Markov matrix included. Memory is the peak of the
process less what it held once the inputs and the head were loaded. Ratios are of pairs that ran one after the other.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from deepspec.losses.fused import block_loss
from deepspec.losses.task import RowTask
from deepspec.nn.head import FrozenHead

ROOT = Path(__file__).parents[2]
CE, L1 = 0.1, 0.9
KINDS = {
    "common_mode": (torch.bfloat16, "eager, bf16 logits"),
    "exact": (torch.float32, "eager, fp32 logits"),
}
"""Our modes, the precision of head and states, and what each is compared with."""
Step = Callable[[], Tensor]


class Inputs:
    """Random states close to the target's, and a head."""

    def __init__(self, rows: int, vocab: int, width: int, rank: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        weight = torch.empty(vocab, width, dtype=dtype)
        for start in range(0, vocab, 8192):
            weight[start : start + 8192] = randn(min(8192, vocab - start), width) * width**-0.5
        self.head = FrozenHead(embedding=weight, weight=weight)
        target = 3.0 * randn(rows, width)
        self.target = target.to(dtype)
        self.hidden = (target + 0.5 * randn(rows, width)).to(dtype).requires_grad_()
        self.markov = randn(rows, rank).to(dtype).requires_grad_()
        self.w2 = (0.02 * randn(vocab, rank)).to(dtype).requires_grad_()
        self.labels = torch.randint(0, vocab, (rows,), generator=generator)
        self.weights = torch.ones(rows)

    def ours(self, mode: str) -> Tensor:
        """The loss in one pass."""
        task = RowTask(
            target_hidden=self.target,
            target_index=torch.arange(len(self.labels)),
            labels=self.labels,
            weights=self.weights,
            head=self.head,
            ce=CE,
            l1=L1,
            mode=mode,  # type: ignore[arg-type]
        )
        return block_loss(self.hidden, task, self.markov, self.w2).total

    def eager(self) -> Tensor:
        """Whole logits in the precision of the head, two softmax graphs in fp32."""
        draft = self.hidden @ self.head.weight.t() + self.markov @ self.w2.t()
        with torch.no_grad():
            target = self.target @ self.head.weight.t()
        ce = functional.cross_entropy(draft.float(), self.labels, reduction="none")
        l1 = (draft.float().softmax(-1) - target.float().softmax(-1)).abs().sum(-1)
        return (self.weights * (CE * ce + L1 * l1)).sum()


def child(arguments: argparse.Namespace) -> None:
    """Measure one kind and print it as JSON."""
    torch.set_num_threads(arguments.threads)
    kind = arguments.child
    dtype, _ = KINDS[kind.removeprefix("eager-")]
    inputs = Inputs(arguments.rows[0], arguments.vocab, arguments.width, arguments.rank, dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        loss = inputs.eager() if kind.startswith("eager-") else inputs.ours(kind)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        for tensor in (inputs.hidden, inputs.markov, inputs.w2):
            tensor.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    sys.stdout.write(json.dumps({"seconds": seconds, "peak": peak, "loss": loss.item()}) + "\n")


def measure(arguments: argparse.Namespace, kind: str, rows: int) -> dict[str, object] | None:
    """Run one kind in a process of its own; None when it ran out of memory."""
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("vocab", "width", "rank", "threads", "repeats")]
    command = [sys.executable, "-m", "tests.bench.loss", "--child", kind, "--rows", str(rows), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    say = sys.stdout.write
    say(f"{platform.machine()}, {arguments.threads} threads, torch {torch.__version__}, ")
    say(f"V {arguments.vocab}, D {arguments.width}, rank {arguments.rank}, medians of {arguments.repeats}\n\n")
    columns = ("rows", "ours", "s", "peak GB", "against", "s", "peak GB", "times as fast", "of its memory")
    say(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    for rows in arguments.rows:
        for kind, (_, name) in KINDS.items():
            ours, eager = measure(arguments, kind, rows), measure(arguments, f"eager-{kind}", rows)
            say("| " + " | ".join(_cells(rows, kind, name, ours, eager)) + " |\n")


def _cells(
    rows: int, kind: str, name: str, ours: dict[str, object] | None, eager: dict[str, object] | None
) -> list[str]:
    def seconds(found: dict[str, object]) -> list[float]:
        return list(found["seconds"])  # type: ignore[call-overload]

    def shown(found: dict[str, object] | None) -> list[str]:
        if found is None:
            return ["out of memory", ""]
        return [f"{statistics.median(seconds(found)):.2f}", f"{float(found['peak']) / 1e9:.2f}"]  # type: ignore[arg-type]

    cells = [str(rows), kind, *shown(ours), name, *shown(eager)]
    if ours is None or eager is None:
        return [*cells, "", ""]
    ratio = statistics.median(b / a for a, b in zip(seconds(ours), seconds(eager), strict=True))
    return [*cells, f"{ratio:.2f}", f"1/{float(eager['peak']) / float(ours['peak']):.1f}"]  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
