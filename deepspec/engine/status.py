"""``status.json``: what became of a run. Launchers replace exit codes, so the launch scripts read this file."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deepspec.checkpoint.atomic import write_json
from deepspec.errors import EXIT_FAILURE, EXIT_OK, DeepSpecError, Interrupted
from deepspec.log import get_logger, rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

log = get_logger(__name__)


@contextmanager
def recorded_status(run: Path) -> Iterator[None]:
    """Record how the block ends: finished, interrupted, or failed with the reason. Errors pass through."""
    started = time.time()
    if rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        _write(run, "running", "", started)
    try:
        yield
    except Interrupted as stop:
        if rank() == 0 and not _has_ended(run, started):  # else a launcher ends the ranks after another one's failure
            _write(run, "interrupted", str(stop), started, stop.exit_code)
        raise
    except BaseException as error:
        _record_failure(run, error, started)
        raise
    if rank() == 0:
        _write(run, "finished", "", started, EXIT_OK)


def _record_failure(run: Path, error: BaseException, started: float) -> None:
    """Write the failure of any rank; the first end of any stands, since the others only follow from it."""
    reason = str(error) if isinstance(error, DeepSpecError) else f"{type(error).__name__}: {error}"
    try:
        if _has_ended(run, started):
            return
        code = error.exit_code if isinstance(error, DeepSpecError) else EXIT_FAILURE
        _write(run, "failed", reason if rank() == 0 else f"rank {rank()}: {reason}", started, code)
    except OSError as problem:
        log.error("status.json could not be written: %s", problem)


def _has_ended(run: Path, started: float) -> bool:
    try:
        status = json.loads((run / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    # Ranks start within a minute of each other; an older end belongs to an earlier start of the same run.
    return status.get("status") in ("failed", "interrupted") and float(status.get("time", 0)) >= started - 60


def _write(run: Path, status: str, reason: str, started: float, exit_code: int | None = None) -> None:
    value = {"version": 1, "status": status, "reason": reason, "exit_code": exit_code}
    times = {"started": started, "time": time.time(), "pid": os.getpid(), "rank": rank()}
    write_json(run / "status.json", value | times)
