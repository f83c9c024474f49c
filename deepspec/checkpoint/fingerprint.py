"""Which part of a configuration has changed since a checkpoint was written."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from deepspec.errors import ConfigError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

log = get_logger(__name__)

BINDING = ("drafter", "target")
"""Sections without which the weights in a checkpoint make no sense."""


def fingerprints(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return a short hash of each section (plain values)."""
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in sections.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


def check_fingerprints(saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Refuse another drafter or target; warn about any other section that changed.

    Raises:
        ConfigError: naming the sections.
    """
    changed = [name for name in current if name in saved and saved[name] != current[name]]
    binding = [name for name in changed if name in BINDING]
    if binding:
        raise ConfigError(
            f"{' and '.join(binding)} changed since this run's checkpoint was written; set it back, "
            "choose another paths.run, or start anew with train.resume=false"
        )
    if changed:
        log.warning("resuming with another %s: the run will differ from an uninterrupted one", ", ".join(changed))
