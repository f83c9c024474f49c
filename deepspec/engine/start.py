"""What a drafter starts with: the tokens it can propose, and the weights that come from its target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.data.vocabulary import choose_tokens
from deepspec.engine.warm_start import warm_start
from deepspec.log import get_logger, progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepspec.config.schema import RunConfig
    from deepspec.contracts import Batch, Features, TargetInfo
    from deepspec.drafters.base import Drafter
    from deepspec.engine.distributed import Ranks
    from deepspec.engine.inputs import Inputs
    from deepspec.features.online import FeatureSource
    from deepspec.targets.target import Target

log = get_logger(__name__)

MAX_POSITIONS = 2**16  # their features are held in memory together
FIT_ANCHORS = 32
"""Anchors of a sample that a fit looks at. On 320 samples of the quickstart 24 give the same expected length before the
first step, 1.42, as an anchor at every token does, in less than half the time."""


def choose_vocabulary(cfg: RunConfig, drafter: Drafter, info: TargetInfo, inputs: Inputs) -> None:
    """Choose the tokens of a reduced draft vocabulary, the same on every rank; a checkpoint's take their place."""
    size = getattr(cfg.drafter, "draft_vocab_size", None)
    if size is None:
        return
    chosen = choose_tokens(inputs.samples, size, info.vocab_size, always=info.eos_token_ids)
    drafter.set_vocabulary(chosen.ids)
    log.info("%s", chosen.line(info.vocab_size))


def start_weights(
    cfg: RunConfig, drafter: Drafter, target: Target, inputs: Inputs, features: FeatureSource, ranks: Ranks
) -> None:
    """Give the drafter the weights that ``drafter.init`` and ``train.warm_start`` ask for, the same on every rank."""
    init, lines = getattr(cfg.drafter, "init", "random"), []
    if init != "random":
        lines += drafter.initialise_from(target.model)
        drafter.to(ranks.device)  # where the ranks exchange tensors
        if init == "fitted" and ranks.is_first:
            lines += drafter.fit(_examples(cfg, inputs, features, ranks))
        ranks.broadcast_(drafter.parameters())
    if cfg.train.warm_start is not None:
        lines += warm_start(drafter, cfg.train.warm_start, target)
    for line in lines:
        log.info("%s", line)


def _examples(cfg: RunConfig, inputs: Inputs, features: FeatureSource, ranks: Ranks) -> list[tuple[Batch, Features]]:
    """Return the first samples of the training run, with many anchors, and their features."""
    wanted = getattr(cfg.drafter, "fit_samples", 0)
    batches = [batch.to(ranks.device) for batch in _first(inputs.first_batches(FIT_ANCHORS), wanted)]
    log.info("fitting the first layer to %d samples", sum(len(batch.sample_ids) for batch in batches))
    return [(batch, features(batch)) for batch in progress(batches, len(batches), "features for the fit")]


def _first(batches: Iterator[Batch], wanted: int) -> Iterator[Batch]:
    samples = positions = 0
    for batch in batches:
        if samples and positions + batch.input_ids.numel() > MAX_POSITIONS:
            return
        yield batch
        samples, positions = samples + len(batch.sample_ids), positions + batch.input_ids.numel()
        if samples >= wanted:
            return
