"""What a training run reads: the samples of its files, dealt to steps, ranks and micro-batches."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepspec.data.answer_store import AnswerStore
from deepspec.data.chat import ChatRenderer
from deepspec.data.loader import BatchLoader, BatchMaker
from deepspec.data.prepare import prepare_samples
from deepspec.data.sampler import BatchPlan, validation_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from deepspec.config.schema import RunConfig
    from deepspec.contracts import Batch
    from deepspec.data.samples import SampleSet
    from deepspec.engine.distributed import Ranks
    from deepspec.targets.target import Target


@dataclass(frozen=True)
class Inputs:
    """Training batches from any step on, the samples they are made of, and the validation batches of one pass."""

    batches: Callable[[int], Iterable[tuple[int, Sequence[Batch]]]]
    first_batches: Callable[[int], Iterator[Batch]]
    """The micro-batches of all ranks in the first epoch, with at most so many anchors a sample."""
    total_steps: int
    steps_per_epoch: int
    samples: SampleSet
    validation: Callable[[], Iterable[Batch]] | None = None


def read_inputs(cfg: RunConfig, target: Target, ranks: Ranks) -> Inputs:
    """Read the samples, and plan which of them this rank sees in which step.

    Raises:
        DataError: a file is malformed, has prompts without answers, or no usable sample.
    """
    options, eos, cache = cfg.target.template_options, target.info.eos_token_ids, Path(cfg.paths.cache)
    renderer = ChatRenderer(target.tokenizer, options, eos_token_ids=eos, max_length=cfg.data.max_length)
    store = AnswerStore(cache, renderer, cfg.target.path, cfg.target.revision, asdict(cfg.generate))

    def samples(path: str) -> SampleSet:
        answered = store.file(path, cfg.data.limit)
        return ranks.first_then_all(lambda: prepare_samples(answered, renderer, cache, limit=cfg.data.limit))

    def maker(split: SampleSet, anchors: int = cfg.data.anchors_per_sample) -> BatchMaker:
        return BatchMaker(split, seed=cfg.data_seed, anchors_per_sample=anchors, anchor_share=cfg.data.anchor_share)

    def planned(world_size: int) -> BatchPlan:
        return BatchPlan(
            train.lengths,
            global_batch_size=cfg.engine.global_batch_size,
            micro_batch_size=micro,
            world_size=world_size,
            seed=cfg.data_seed,
            row_tokens=cfg.data.row_tokens,
        )

    micro, world = cfg.engine.micro_batch_size, ranks.world_size
    train = samples(cfg.data.train)
    plan = planned(world)
    steps = min(plan.num_steps(cfg.train.epochs), cfg.train.max_steps or sys.maxsize)
    batches = partial(BatchLoader, maker(train), plan, stop=steps, rank=ranks.rank)
    validation = None
    if cfg.train.validate_every is not None and cfg.data.validation is not None:
        held_out = samples(cfg.data.validation)
        parts = validation_batches(held_out.lengths, micro_batch_size=micro, world_size=world, rank=ranks.rank)
        validation = partial(map, maker(held_out), parts)

    def first_batches(anchors: int) -> Iterator[Batch]:
        whole = planned(1)
        for step in range(min(steps, plan.num_steps(1))):
            yield from map(maker(train, anchors), whole.micro_batches(step))

    return Inputs(
        batches=lambda start: batches(start=start),
        first_batches=first_batches,
        total_steps=steps,
        steps_per_epoch=plan.num_steps(1),
        samples=train,
        validation=validation,
    )
