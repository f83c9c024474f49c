"""A whole training step: the published shape (``published.py``) against ours, on the same samples and anchors.

    python -m tests.bench.step                                # the quickstart's target and samples, from the cache
    python -m tests.bench.step --quick                        # a tiny random target: does the code still run
    python -m tests.bench.step target=path target.path=FOLDER ...     # any overrides of the recipe quickstart

Ours is the real trainer with the recipe's drafter. Every variant takes its turn on a step before any sees the next, so
ratios are of pairs that ran one after the other. The published shape runs in bf16, as published, and in fp32: on a CPU
without bf16 arithmetic the first ratio says more about the processor than about the shape.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspec.engine.build import build_engine
from deepspec.engine.loop import Limits, Trainer
from deepspec.engine.meters import Stopwatch
from deepspec.features.online import OnlineFeatures, RememberedFeatures
from deepspec.log import emit
from tests.bench import common
from tests.bench.common import Measured
from tests.bench.published import PublishedStep

if TYPE_CHECKING:
    from deepspec.config.schema import EngineConfig, OptimConfig
    from deepspec.contracts import Batch, TargetInfo
    from deepspec.drafters.dspark.config import DSparkConfig
    from deepspec.drafters.dspark.model import DSparkDrafter
    from deepspec.engine.distributed import Ranks
    from deepspec.features.online import FeatureSource
    from deepspec.targets.target import Target

PREPARE = "python -m deepspec.prepare recipe=quickstart"
MEMORY = 2**31  # bytes of remembered features
PROMPT = 8  # tokens of a random sample that are not supervised
PARTS = ("target", "draft", "optimiser")
COLUMNS = ("step", "steps", "s", *PARTS, "peak GB", "loss")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Bench:
    """What all variants share."""

    targets: dict[str, Target]  # by precision
    drafter: DSparkConfig  # with the whole vocabulary
    draft_ids: Sequence[int]  # a reduced vocabulary
    taps: tuple[int, ...]
    mask_token_id: int
    engine: EngineConfig
    optim: OptimConfig
    ranks: Ranks
    steps: list[Sequence[Batch]]  # micro-batches of each step

    @property
    def info(self) -> TargetInfo:
        """The target's description."""
        return next(iter(self.targets.values())).info

    def build(self, precision: str, *, reduced: bool = False) -> DSparkDrafter:
        """Return a drafter in fp32 on the device, with the same weights each time, bound to the target."""
        config = replace(self.drafter, draft_vocab_size=len(self.draft_ids) if reduced else None, init="random")
        torch.manual_seed(0)
        made = config.build(self.info, self.taps, self.mask_token_id)
        if made.markov_head is not None:
            with torch.no_grad():
                made.markov_head.markov_w2.weight.normal_(std=0.02)  # zeros would hide a difference
        made.bind(self.targets[precision].head)
        if reduced:
            made.set_vocabulary(self.draft_ids)
        return made.to(self.ranks.device)

    def online(self, precision: str) -> FeatureSource:
        """Return the features of the target, run at every visit."""
        return OnlineFeatures(self.targets[precision], self.taps)

    def remembered(self, precision: str) -> FeatureSource:
        """Return features that are in memory already."""
        source = RememberedFeatures(self.online(precision), MEMORY)
        for batches in self.steps:
            for batch in batches:
                source(batch)
        return source


class Variant:
    """One way to run a step, and what its parts took so far."""

    def __init__(self, bench: Bench, stopwatch: Stopwatch, run: Callable[[int], torch.Tensor]) -> None:
        self._bench, self._stopwatch, self._run = bench, stopwatch, run
        self.parts: dict[int, dict[str, float]] = {}  # seconds of each turn
        self.losses: list[float] = []

    def __call__(self, turn: int) -> Measured:
        """Run the step of a turn."""
        found: list[torch.Tensor] = []
        measured = common.measure(lambda: found.append(self._run(turn)), self._bench.ranks.device)
        self.parts[turn] = self._stopwatch.read()
        self.losses.append(float(found[0]))
        return measured


def published(bench: Bench, precision: str) -> Variant:
    """Return the published shape with the weights, features and logits in ``precision``."""
    drafter = bench.build(precision).to(bench.targets[precision].head.weight.dtype)
    step = PublishedStep(drafter, bench.online(precision))
    return Variant(bench, step.stopwatch, lambda turn: step(bench.steps[turn]))


def ours(bench: Bench, precision: str, features: FeatureSource, *, reduced: bool = False) -> Variant:
    """Return the trainer's own step."""
    drafter = bench.build(precision, reduced=reduced)
    engine = replace(bench.engine, kind="plain", precision=precision)  # type: ignore[arg-type]
    trainer = Trainer(
        drafter=drafter,
        engine=build_engine(drafter, ranks=bench.ranks, engine=engine, optim=bench.optim),
        batches=lambda _start: (),
        features=features,
        schedule=lambda _step: 1.0,
        limits=Limits(len(bench.steps), len(bench.steps), bench.engine.global_batch_size, 1, 1),
    )

    def run(turn: int) -> torch.Tensor:
        trainer.train_step(turn, bench.steps[turn])
        means: dict[str, Any] = dict(trainer.meters.reduce(bench.ranks))
        return torch.tensor([means[f"loss/{name}"] * weight for name, weight in drafter.coefficients.items()]).sum()

    return Variant(bench, trainer.stopwatch, run)


def variants(bench: Bench) -> dict[str, Variant]:
    """Return all that are timed, by the names of the table; neighbours are pairs."""
    made = {}
    for precision in bench.targets:
        made[f"published {precision}"] = published(bench, precision)
        made[f"ours {precision}"] = ours(bench, precision, bench.online(precision))
    last, size = list(bench.targets)[-1], f"{len(bench.draft_ids):,} draft tokens"
    made[f"ours {last}, {size}"] = ours(bench, last, bench.online(last), reduced=True)
    made[f"ours {last}, {size}, features remembered"] = ours(bench, last, bench.remembered(last), reduced=True)
    return made


def run(bench: Bench, budget: float) -> dict[str, Variant]:
    """Time all variants and write the table; return them."""
    made = variants(bench)
    results = common.in_turn(made, len(bench.steps) - 1, budget)
    rows = [sum(batch.anchor_mask.numel() for batch in step) * bench.drafter.gamma for step in bench.steps]
    tokens = [sum(batch.input_ids.numel() for batch in step) for step in bench.steps]
    info, baselines = bench.info, [f"published {precision}" for precision in bench.targets]
    emit(
        f"{info.name}: D {info.hidden_size}, V {info.vocab_size:,}; {bench.drafter.num_layers} drafter layers, "
        f"{min(rows)} .. {max(rows)} slots and {min(tokens)} .. {max(tokens)} tokens a step, padding included\n"
    )
    common.emit_columns([*COLUMNS, *(f"{name} / it" for name in baselines)])
    for name, variant in made.items():
        found = results[name]
        turns = common.settled(found)
        parts = [f"{statistics.median(variant.parts[turn].get(part, 0.0) for turn in turns):.2f}" for part in PARTS]
        ratios = [common.median_ratio(results[other], found) if other != name else None for other in baselines]
        seconds, peak = f"{common.median_seconds(found):.2f}", common.gigabytes(common.highest_peak(found))
        cells = [name, str(len(turns)), seconds, *parts, peak, f"{variant.losses[0]:.4f}"]
        common.emit_row([*cells, *map(common.times, ratios)])
    return made


def quickstart(overrides: Sequence[str], num_steps: int, precisions: Sequence[str]) -> Iterator[Bench]:
    """Yield the recipe quickstart's bench while its ranks are joined; nothing, with a line, where its files are not."""
    from deepspec.config.compose import compose_run
    from deepspec.data.vocabulary import choose_tokens
    from deepspec.engine.distributed import joined_ranks
    from deepspec.engine.inputs import read_inputs
    from deepspec.errors import DataError
    from deepspec.targets.load import layer_ids, load_target

    cfg = compose_run(["recipe=quickstart", "engine.kind=plain", *overrides])
    if not Path(cfg.target.path).is_dir():
        emit(f"not measured: {cfg.target.path} is not there; {PREPARE}")
        return
    with joined_ranks(cfg.engine) as ranks:
        targets = {name: load_target(cfg.target, ranks.device, DTYPES[name]) for name in precisions}
        target = next(iter(targets.values()))
        info = target.info
        try:
            inputs = read_inputs(cfg, target, ranks)
        except DataError as error:
            emit(f"not measured: {error}; {PREPARE}")
            return
        size = cfg.drafter.draft_vocab_size or info.vocab_size
        yield Bench(
            targets=targets,
            drafter=replace(cfg.drafter, draft_vocab_size=None),
            draft_ids=choose_tokens(inputs.samples, size, info.vocab_size, always=info.eos_token_ids).ids.tolist(),
            taps=layer_ids(cfg.target, info.num_layers),
            mask_token_id=cfg.target.mask_token_id,
            engine=cfg.engine,
            optim=cfg.optim,
            ranks=ranks,
            steps=[
                [batch.to(ranks.device) for batch in batches] for _, batches in islice(inputs.batches(0), num_steps + 1)
            ],
        )


def tiny(num_steps: int) -> Bench:
    """Return a bench of a random target and random samples that takes a moment."""
    from deepspec.config.schema import EngineConfig, OptimConfig
    from deepspec.contracts import Sample
    from deepspec.data.loader import BatchMaker
    from deepspec.data.sampler import BatchPlan
    from deepspec.drafters.dspark.config import DSparkConfig
    from deepspec.engine.distributed import Ranks
    from deepspec.targets.target import Target
    from tests.helpers import MASK_TOKEN_ID, tiny_target

    wide, low = tiny_target(), tiny_target()
    low.model.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in range(20, 32, 3):
        ids = torch.randint(4, 97, (length,), generator=generator).tolist()
        samples.append(Sample(f"s{length}", tuple(ids), tuple(place > PROMPT for place in range(length))))
    plan = BatchPlan([len(s.input_ids) for s in samples], global_batch_size=4, micro_batch_size=4)
    make = BatchMaker(samples, seed=0, anchors_per_sample=12)
    return Bench(
        targets={"bf16": Target(low.model, low.tokenizer, name=low.info.name), "fp32": wide},
        drafter=DSparkConfig(num_layers=2, gamma=3, markov_rank=8),
        draft_ids=range(40),
        taps=(1, 3),
        mask_token_id=MASK_TOKEN_ID,
        engine=EngineConfig(kind="plain", precision="fp32", micro_batch_size=4, global_batch_size=4, device="cpu"),
        optim=OptimConfig(),
        ranks=Ranks(0, 0, 1, torch.device("cpu")),
        steps=[[make(entries) for entries in plan.micro_batches(step)] for step in range(num_steps + 1)],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny target")
    parser.add_argument("--steps", type=int, default=5, help="timed after one that warms up")
    parser.add_argument("--budget", type=float, default=120, help="seconds after which a variant stops, the step ended")
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the pairs")
    parser.add_argument("overrides", nargs="*", default=[], help="of the recipe quickstart")
    arguments = parser.parse_args(argv)
    precisions = [name for name in DTYPES if name in arguments.precisions]
    benches = [tiny(1)] if arguments.quick else quickstart(arguments.overrides, arguments.steps, precisions)
    for bench in benches:
        common.emit_header("tests.bench.step", bench.ranks.device, argv)
        run(bench, arguments.budget)


if __name__ == "__main__":
    main()
