"""From a resolved configuration to an engine and to a trainer with its hooks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from deepspec.checkpoint.aside import set_aside
from deepspec.checkpoint.fingerprint import check_fingerprints, fingerprints
from deepspec.checkpoint.store import CheckpointStore
from deepspec.engine.hooks import LogHook, ProgressHook, SaveHook, SignalHook, ValidateHook
from deepspec.engine.loop import Limits, Trainer
from deepspec.engine.plain import PlainEngine
from deepspec.engine.schedule import make_schedule
from deepspec.engine.tracker import make_tracker
from deepspec.errors import ConfigError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from deepspec.config.schema import EngineConfig, OptimConfig, RunConfig
    from deepspec.contracts import Batch, Features, TargetInfo
    from deepspec.drafters.base import Drafter
    from deepspec.engine.base import Engine
    from deepspec.engine.distributed import Ranks
    from deepspec.engine.inputs import Inputs
    from deepspec.nn.attention import AttentionBackend

log = get_logger(__name__)


def attention_backend(wanted: AttentionBackend, device: torch.device) -> AttentionBackend:
    """Return ``wanted``, the value of ``engine.attention``.

    Raises:
        ConfigError: ``device`` cannot train with it.
    """
    if wanted == "flex" and device.type != "cuda":
        raise ConfigError(
            f"engine.attention=flex has no backward pass on {device.type}: use engine.attention=auto, sdpa or eager"
        )
    return wanted


def build_engine(drafter: Drafter, *, ranks: Ranks, engine: EngineConfig, optim: OptimConfig) -> Engine:
    """Build the engine around a drafter that has its weights and is bound to its target."""
    if engine.kind == "plain":
        return PlainEngine(drafter, ranks=ranks, engine=engine, optim=optim)
    from deepspec.engine.zero import ZeroEngine  # imports DeepSpeed, which the plain engine does without

    return ZeroEngine(drafter, ranks=ranks, engine=engine, optim=optim)


def build_trainer(
    cfg: RunConfig,
    *,
    run: Path,
    ranks: Ranks,
    drafter: Drafter,
    info: TargetInfo,
    inputs: Inputs,
    features: Callable[[Batch], Features],
    start: Callable[[], None],
    plain_config: Mapping[str, Any],
) -> Trainer:
    """Put a training run together and, unless ``train.resume`` is off, take over its newest checkpoint.

    ``start`` gives the drafter its first weights; it is called where there is no checkpoint.

    Raises:
        ConfigError: the checkpoint was written with another target or drafter.
    """
    store = CheckpointStore(
        run / "checkpoints",
        drafter=drafter,
        config=cfg.drafter,
        info=info,
        fingerprints=fingerprints(drafter, info, inputs.samples, inputs.total_steps, plain_config),
        keep=cfg.train.keep,
    )
    began = time.monotonic()
    found = _newest(store, ranks) if cfg.train.resume else None
    if not cfg.train.resume and ranks.is_first:
        set_aside(run)
    if found is None:
        start()
    else:
        check_fingerprints(store.read_fingerprints(found), store.fingerprints)
    trainer = Trainer(
        drafter=drafter,
        engine=build_engine(drafter, ranks=ranks, engine=cfg.engine, optim=cfg.optim),
        batches=inputs.batches,
        features=features,
        schedule=make_schedule(
            inputs.total_steps,
            warmup_ratio=cfg.optim.warmup_ratio,
            kind=cfg.optim.schedule,
            min_lr_ratio=cfg.optim.min_lr_ratio,
            decay_ratio=cfg.optim.decay_ratio,
        ),
        limits=Limits(
            total_steps=inputs.total_steps,
            steps_per_epoch=inputs.steps_per_epoch,
            global_batch_size=cfg.engine.global_batch_size,
            check_every=min(cfg.train.log_every, cfg.train.max_bad_steps),
            max_bad_steps=cfg.train.max_bad_steps,
        ),
        hooks=_hooks(cfg, run, ranks, store, inputs, plain_config),
        seconds=time.monotonic() - began,
    )
    if found is not None:
        checkpoint = store.load(found)
        trainer.resume(checkpoint)
        log.info("going on from %s: step %d", checkpoint.folder, checkpoint.progress.step)
    return trainer


def _newest(store: CheckpointStore, ranks: Ranks) -> str | None:
    """Return the first rank's choice on every rank."""
    if ranks.world_size == 1:
        return store.newest()
    return ranks.from_first(store.newest() if ranks.is_first else None)


def _hooks(
    cfg: RunConfig, run: Path, ranks: Ranks, store: CheckpointStore, inputs: Inputs, plain_config: Mapping[str, Any]
) -> list[Any]:
    tracker = make_tracker(run, cfg.tracker, plain_config, is_first=ranks.is_first)
    hooks: list[Any] = []
    if cfg.train.validate_every is not None and inputs.validation is not None:
        hooks.append(ValidateHook(tracker, inputs.validation, cfg.train.validate_every))
    hooks += [LogHook(tracker, every=cfg.train.log_every, peak_lr=cfg.optim.lr), SaveHook(store, cfg.train.save_every)]
    return [*hooks, ProgressHook(), SignalHook()]  # the signal's hook ends last: no signal tears the last save
