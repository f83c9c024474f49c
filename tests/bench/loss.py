"""Time and memory of the draft loss: the shape of published code against the one-pass loss.

    python -m tests.bench.loss                        # 2 .. 3,584 rows of a vocabulary of 151,936
    python -m tests.bench.loss --quick                # a tiny size, in this process: does the code still run

Each run, value and gradient, the Markov matrix included, has a process of its own that few rows have warmed up.
Memory is the peak above what the process held once inputs and head were loaded. All kinds run once before any runs
again, and a ratio is the median over these turns. A figure behind ``~`` was not measured, because it does not fit the
memory or one run would take longer than ``--limit``: it lies on the line through the two largest sizes that were. The
accuracy of the gradients (``tests.bench.accuracy``) follows.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspec.log import emit
from deepspec.losses.fused import block_loss
from deepspec.losses.task import RowTask
from deepspec.nn.head import FrozenHead
from tests.bench import accuracy, common
from tests.bench.published import slot_losses

CE, L1 = 0.1, 0.9
TILE = 8192  # rows of the head that are made at a time
SPARE = 2**29  # bytes of the free memory that a process leaves to others
KILLED = -9
WARM_ROWS = 2
MANY_ROWS = 64
"""With fewer rows the gradient of the Markov matrix takes the memory, so nothing follows about the logits of more."""
COLUMNS = (
    "rows", "ours", "s", "peak GB", "runs", "published", "s", "peak GB", "runs", "times as fast", "of its memory",
)  # fmt: skip


class Kind(NamedTuple):
    """One way to the loss, and the precision of states and head."""

    mode: str  # of our loss, or "published"
    dtype: torch.dtype


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
KINDS = {
    f"{mode} {dtype}": Kind(mode, DTYPES[dtype])
    for mode, dtype in (
        ("published", "bf16"), ("common_mode", "bf16"), ("exact", "bf16"), ("published", "fp32"), ("exact", "fp32"),
    )
}  # fmt: skip
PAIRS = {
    "common_mode bf16": "published bf16",
    "exact bf16": "published bf16",
    "exact fp32": "published fp32",
}
"""What each of ours is compared with. A CPU takes common_mode for bf16 by default, a GPU exact."""


@dataclass(frozen=True)
class Figure:
    """Time and memory of one kind at one size."""

    seconds: list[float]  # one for each run
    peak: float  # bytes, nan where it cannot be told
    loss: float = float("nan")
    measured: bool = True

    def cells(self) -> list[str]:
        """Return time, peak and number of runs for the table."""
        mark = "" if self.measured else "~"
        runs = str(len(self.seconds)) if self.measured else ""
        peak = "" if math.isnan(self.peak) else f"{mark}{common.gigabytes(self.peak)}"
        return [f"{mark}{statistics.median(self.seconds):.2f}", peak, runs]


class Inputs:
    """Random states close to the target's, and a head."""

    def __init__(self, rows: int, arguments: Any, dtype: torch.dtype, device: torch.device) -> None:
        vocab, width, rank = arguments.vocab, arguments.width, arguments.rank
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        weight = torch.empty(vocab, width, dtype=dtype, device=device)
        for start in range(0, vocab, TILE):
            weight[start : start + TILE] = randn(min(TILE, vocab - start), width) * width**-0.5
        self.head = FrozenHead(embedding=weight, weight=weight)
        target = 3.0 * randn(rows, width)
        self.target = target.to(device, dtype)
        self.hidden = (target + 0.5 * randn(rows, width)).to(device, dtype).requires_grad_()
        self.markov = randn(rows, rank).to(device, dtype).requires_grad_()
        self.w2 = (0.02 * randn(vocab, rank)).to(device, dtype).requires_grad_()
        self.labels = torch.randint(0, vocab, (rows,), generator=generator).to(device)
        self.weights = torch.ones(rows, device=device)

    def ours(self, mode: str, few: slice) -> Tensor:
        """The loss in one pass; every row has a target position of its own, so none is saved."""
        labels = self.labels[few]
        task = RowTask(
            target_hidden=self.target[few],
            target_index=torch.arange(len(labels), device=labels.device),
            labels=labels,
            weights=self.weights[few],
            head=self.head,
            ce=CE,
            l1=L1,
            mode=mode,  # type: ignore[arg-type]
        )
        return block_loss(self.hidden[few], task, self.markov[few], self.w2).total

    def published(self, few: slice) -> Tensor:
        """Whole logits in the precision of the head; softmax twice in fp32."""
        draft = self.head.logits(self.hidden[few]) + self.markov[few] @ self.w2.t()
        with torch.no_grad():
            target = self.head.logits(self.target[few])
        ce, l1, _ = slot_losses(draft, target, self.labels[few])
        return (self.weights[few] * (CE * ce + L1 * l1)).sum()

    def run(self, kind: Kind, most: int | None = None) -> float:
        """Form value and gradient of the rows, the first ``most`` of them; drop the gradient, return the value."""
        few = slice(most)
        loss = self.published(few) if kind.mode == "published" else self.ours(kind.mode, few)
        loss.backward()
        for tensor in (self.hidden, self.markov, self.w2):
            tensor.grad = None
        return loss.item()


def measure_here(arguments: Any, name: str, rows: int) -> Figure:
    """Run one kind once in this process."""
    kind, device = KINDS[name], common.choose_device(arguments.device)
    inputs = Inputs(rows, arguments, kind.dtype, device)
    inputs.run(kind, WARM_ROWS)
    memory = common.Memory(device)
    losses: list[float] = []
    memory.start()
    seconds = common.seconds_of(lambda: losses.append(inputs.run(kind)), device)
    return Figure([seconds], memory.peak(), losses[0])


def child(arguments: Any) -> None:
    """Measure one kind and print it as JSON, null where it ran out of memory."""
    torch.set_num_threads(arguments.threads)
    if common.choose_device(arguments.device).type == "cpu":
        _leave_memory_to_others()
    try:
        found = asdict(measure_here(arguments, arguments.child, arguments.rows[0]))
    except (MemoryError, RuntimeError) as error:  # a CPU's allocator raises the latter
        if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        found = None
    emit(json.dumps(found))


def _leave_memory_to_others() -> None:
    """Fail by an error where the machine's free memory ends, before the kernel ends some process."""
    facts = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in facts if line.startswith("MemAvailable:"))
    resource.setrlimit(resource.RLIMIT_DATA, (max(SPARE, free - SPARE), resource.RLIM_INFINITY))


def measure_apart(arguments: Any, name: str, rows: int) -> Figure | None:
    """Run one kind once in a process of its own; None when it ran out of memory."""
    names = ("vocab", "width", "rank", "threads", "device")
    sizes = [f"--{option}={getattr(arguments, option)}" for option in names]
    command = [sys.executable, "-m", "tests.bench.loss", "--child", name, "--rows", str(rows), *sizes]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True, check=False)
    if done.returncode == KILLED:
        return None
    if done.returncode != 0:
        raise SystemExit(f"{name}, {rows} rows: {done.stderr.strip()}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return None if found is None else Figure(**found)


class Line(NamedTuple):
    """The line through the two largest sizes of a kind that were measured."""

    sizes: tuple[int, int]
    seconds: float  # per row
    peak: float  # bytes per row, nan where few rows were measured

    @classmethod
    def of(cls, known: dict[int, Figure]) -> Line | None:
        """Draw it; None with fewer than two sizes."""
        sizes = sorted(size for size, one in known.items() if one.measured)[-2:]
        if len(sizes) < 2:  # noqa: PLR2004 - points of a line
            return None
        first, second = (known[size] for size in sizes)
        rows = sizes[1] - sizes[0]
        seconds = (statistics.median(second.seconds) - statistics.median(first.seconds)) / rows
        peak = (second.peak - first.peak) / rows if sizes[0] >= MANY_ROWS else math.nan
        return cls((sizes[0], sizes[1]), seconds, peak)

    def at(self, rows: int, known: dict[int, Figure]) -> Figure:
        """Continue the line."""
        last, more = known[self.sizes[1]], rows - self.sizes[1]
        seconds = statistics.median(last.seconds) + more * self.seconds
        return Figure([seconds], last.peak + more * self.peak, measured=False)

    def __str__(self) -> str:
        peak = "" if math.isnan(self.peak) else f" and {self.peak / 1e6:.2f} MB"
        return f"from {self.sizes[0]:,} and {self.sizes[1]:,} rows, {1e3 * self.seconds:.2f} ms{peak} a row"


def figures(arguments: Any, names: Sequence[str], rows: int, found: dict[str, dict[int, Figure]]) -> dict[str, Figure]:
    """Measure all kinds at one size, turn by turn, or guess them from smaller ones; leave out what can be neither."""
    lines = {name: Line.of(found[name]) for name in names}
    guesses = {name: line.at(rows, found[name]) for name, line in lines.items() if line is not None}
    runs: dict[str, list[Figure]] = {}
    wanted = [name for name in names if name not in guesses or guesses[name].seconds[0] <= arguments.limit]
    for _turn in range(arguments.repeats):
        for name in list(wanted):
            one = (measure_here if arguments.quick else measure_apart)(arguments, name, rows)
            if one is None:
                wanted.remove(name)
                continue
            runs.setdefault(name, []).append(one)
            if sum(run.seconds[0] for run in runs[name]) > arguments.budget:
                wanted.remove(name)
    return guesses | {name: joined(several) for name, several in runs.items()}


def joined(runs: Sequence[Figure]) -> Figure:
    """Return the runs of one kind at one size as one figure, with the largest peak."""
    return Figure([run.seconds[0] for run in runs], max(run.peak for run in runs), runs[-1].loss)


def times_as_fast(ours: Figure, published: Figure) -> float:
    """Return the median over turns, or the ratio of medians where one of the two was not measured."""
    if ours.measured and published.measured:
        return statistics.median(b / a for a, b in zip(ours.seconds, published.seconds, strict=False))
    return statistics.median(published.seconds) / statistics.median(ours.seconds)


def row(rows: int, name: str, ours: Figure | None, published: Figure | None) -> list[str]:
    """Return a row of the table."""
    missing = ["out of memory", "", ""]
    cells = [str(rows), name, *(ours.cells() if ours else missing)]
    cells += [PAIRS[name], *(published.cells() if published else missing)]
    if ours is None or published is None:
        return [*cells, "", ""]
    mark = "" if ours.measured and published.measured else "~"
    fast = times_as_fast(ours, published)
    share = ours.peak / max(1.0, published.peak)
    return [*cells, f"{mark}{fast:.2f}", "" if math.isnan(share) else f"{mark}{share:.3f}"]


def parse(argv: Sequence[str] | None = None) -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny size")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 32, 256, 1024, 3584])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=list(DTYPES), help="of states and head")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="turns: runs of each kind at each size")
    parser.add_argument(
        "--budget", type=float, default=60, help="seconds of runs after which a kind takes no more turns"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds; a run expected to take longer is left out")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rows, arguments.vocab, arguments.width, arguments.rank, arguments.repeats = [4, 8], 512, 32, 8, 2
    return arguments


def main(argv: Sequence[str] | None = None) -> dict[str, dict[int, Figure]]:
    """Print the table; return its figures by kind and rows."""
    arguments = parse(argv)
    found: dict[str, dict[int, Figure]] = {name: {} for name in KINDS}
    if arguments.child:
        child(arguments)
        return found
    common.emit_header("tests.bench.loss", common.choose_device(arguments.device), argv)
    emit(f"V {arguments.vocab:,}, D {arguments.width:,}, Markov rank {arguments.rank}\n")
    common.emit_columns(COLUMNS)
    wanted = [name for name in KINDS if name.split()[1] in arguments.precisions]
    for rows in sorted(arguments.rows):
        for name, one in figures(arguments, wanted, rows, found).items():
            found[name][rows] = one
        for name in (n for n in wanted if n in PAIRS):
            common.emit_row(row(rows, name, found[name].get(rows), found[PAIRS[name]].get(rows)))
    emit()
    for name, known in found.items():
        if not all(one.measured for one in known.values()):
            emit(f"~ {name}: {Line.of(known)}")
    emit()
    accuracy.report(quick=arguments.quick)
    return found


if __name__ == "__main__":
    main()
