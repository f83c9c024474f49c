"""What a checkpoint was trained on and with, and what of it has changed when a run goes on from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deepspec.errors import ConfigError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deepspec.contracts import TargetInfo
    from deepspec.data.samples import SampleSet
    from deepspec.drafters.base import Drafter

log = get_logger(__name__)

TARGET, SHAPES, CONVENTIONS = "the target", "the shapes of the drafter's tensors", "the block conventions"
SAMPLES, STEPS = "the samples of data.train", "the number of steps"

CAUSES = {
    TARGET: ("target.path", "target.revision"),
    SHAPES: ("drafter.",),
    CONVENTIONS: ("drafter.", "target.target_layer_ids", "target.mask_token_id"),
    SAMPLES: ("data.train", "data.max_length", "data.limit", "generate.", "target.template_options"),
    STEPS: ("train.epochs", "train.max_steps"),
}
"""What is measured, and the settings that can explain a change of it; ``group.`` stands for the whole group."""
BINDING = (TARGET, SHAPES, CONVENTIONS)
"""Without these the weights in a checkpoint make no sense."""
COURSE = (
    "seed",
    "data.seed",
    "drafter.",
    "optim.",
    "data.anchors_per_sample",
    "data.anchor_share",
    "data.row_tokens",
    "engine.global_batch_size",
    "engine.precision",
    "engine.loss_precision",
    "features.memory_gib",
    "target.dtype",
)
"""Settings that shape the course of a run by themselves; ranks, engine and folders do not."""


def fingerprints(
    drafter: Drafter, info: TargetInfo, samples: SampleSet, total_steps: int, config: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return what is measured and the settings that matter, as plain values.

    Args:
        drafter: before an engine shards it.
        info: of the target.
        samples: the training samples.
        total_steps: optimiser steps of the whole run.
        config: the resolved configuration as plain values.
    """
    shapes = json.dumps({name: list(value.shape) for name, value in sorted(drafter.state_dict().items())})
    measured = {
        TARGET: info.fingerprint,
        SHAPES: hashlib.sha256(shapes.encode()).hexdigest()[:16],
        CONVENTIONS: asdict(drafter.conventions),
        SAMPLES: samples.checksum(),
        STEPS: total_steps,
    }
    kept = (*COURSE, *(prefix for prefixes in CAUSES.values() for prefix in prefixes))
    flat = _flat(config)
    if flat.get("data.seed") is None and "seed" in flat:
        flat["data.seed"] = flat["seed"]  # what null stands for, so that naming the same seed is no change
    settings = {key: value for key, value in flat.items() if key.startswith(kept)}
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps({"measured": measured, "settings": settings}, default=str))
    return plain


def check_fingerprints(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse another target or drafter, warn about anything else that changed; both name the keys and the old values.

    Raises:
        ConfigError: the weights of the checkpoint do not fit.
    """
    if "measured" not in saved:
        log.warning("the checkpoint does not say what it was trained on and with: changes since then go unnoticed")
        return
    measured = _changed(saved["measured"], current["measured"])
    settings = _changed(saved["settings"], current["settings"])
    binding = [name for name in measured if name in BINDING]
    if binding:
        keys = _said(settings, tuple(prefix for name in binding for prefix in CAUSES[name]))
        raise ConfigError(
            f"{' and '.join(binding)} changed since this run's checkpoint was written"
            f"{f': {keys}' if keys else ''}; set it back, choose another paths.run, "
            "or start anew with train.resume=false"
        )
    keys = _said(settings, (*COURSE, *(prefix for name in measured for prefix in CAUSES[name])))
    if measured or keys:
        changes = ", ".join([*measured, *([keys] if keys else [])])
        log.warning("changed since the checkpoint: %s; the run will differ from an uninterrupted one", changes)


def _changed(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (old, new) of what both know and say differently."""
    return {key: (saved[key], new) for key, new in current.items() if key in saved and saved[key] != new}


def _said(settings: Mapping[str, tuple[Any, Any]], prefixes: tuple[str, ...]) -> str:
    chosen = [(key, *values) for key, values in settings.items() if key.startswith(prefixes)]
    return ", ".join(f"{key}={json.dumps(new)} (was {json.dumps(old)})" for key, old, new in chosen)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for group, value in config.items():
        flat |= {f"{group}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {group: value}
    return flat
