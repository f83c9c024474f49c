"""Make room for a new start in a run folder, so that nothing of the earlier one is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.checkpoint.atomic import free_path
from deepspec.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

log = get_logger(__name__)

OF_ONE_START = ("checkpoints", "metrics.jsonl", "wandb-id.txt", "config.yaml")


def set_aside(run: Path) -> None:
    """Move what an earlier start wrote into ``before-N`` of the run folder, which is a run folder too."""
    found = [path for name in OF_ONE_START if (path := run / name).exists()]
    if not found:
        return
    aside = free_path(run / "before")
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    log.warning("what the earlier start wrote was moved to %s", aside)
