"""Doing what is left of a study: train, evaluate, go on with the next run, within the time given."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepspec.comparison.process import last_lines
from deepspec.comparison.state import (
    STAGES,
    is_complete,
    is_trained,
    must_start_anew,
    read_json,
    seconds_spent,
    write_seconds,
)
from deepspec.errors import EXIT_INTERRUPTED, EXIT_OK, Interrupted
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deepspec.comparison.plan import PlannedRun

    Execute = Callable[[Sequence[str], Path], int]

log = get_logger(__name__)


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error; it is tried again by the next call."""

    run: str
    stage: str
    reason: str


class Work:
    """One call's work on a study."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        execute: Execute,
        *,
        hours: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``execute`` runs a command with its output in a file and returns the exit code."""
        self._runs, self._execute, self._clock = list(runs), execute, clock
        self._began, self._seconds = clock(), 3600.0 * hours
        self.failures: list[Failure] = []

    def do(self, after_each: Callable[[], object] = lambda: None) -> None:
        """Bring every run to its end; one that fails is noted in ``failures``.

        Raises:
            Interrupted: a signal came, or the time left would not do for the next run.
        """
        pending = [run for run in self._runs if not is_complete(run)]
        for skipped in (run for run in self._runs if run not in pending):
            log.info("%s: finished already", skipped.name)
        for run in pending:
            self._check_time(run)
            failure = self._do(run)
            if failure is not None:
                log.error("%s: %s failed: %s", failure.run, failure.stage, failure.reason)
                self.failures.append(failure)
            after_each()

    def failed_lines(self) -> list[str]:
        """Return a line for each failed run."""
        return [f"  {f.run}, {f.stage}: {f.reason}" for f in self.failures]

    def _check_time(self, run: PlannedRun) -> None:
        """Say how the time stands, and stop where the next run would not fit."""
        done = [r for r in self._runs if is_complete(r)]
        gone, need = self._clock() - self._began, _expected(run, done)
        about = "" if need is None else f", about {need / 60:.0f} min by the finished ones"
        log.info(
            "%s%s; %d of %d runs are finished, %.0f of %.0f min gone",
            run.name, about, len(done), len(self._runs), gone / 60, self._seconds / 60,
        )  # fmt: skip
        if gone + (need or 0.0) > self._seconds or gone >= self._seconds:
            raise Interrupted(
                f"{gone / 60:.0f} of {self._seconds / 60:.0f} min (study.hours={self._seconds / 3600:g}) are gone and "
                f"{run.name} would not fit{about}; {len(done)} of {len(self._runs)} runs are finished: run the same "
                "command to go on, or raise study.hours"
            )

    def _do(self, run: PlannedRun) -> Failure | None:
        """Train what is not trained, and evaluate."""
        (run.folder / "logs").mkdir(parents=True, exist_ok=True)
        if not is_trained(run):
            anew = must_start_anew(run)
            if anew:
                log.info("%s: the folder holds a training with other settings, which is set aside", run.name)
                write_seconds(run, "train", 0.0)
            failure = self._stage(run, "train", (*run.train, *(["train.resume=false"] if anew else [])))
            if failure is not None:
                return failure
        return self._stage(run, "evaluate", run.evaluate)

    def _stage(self, run: PlannedRun, stage: str, command: Sequence[str]) -> Failure | None:
        output, since, began = run.folder / "logs" / f"{stage}.txt", time.time(), self._clock()
        log.info("%s: %s, see %s", run.name, stage, output)
        before = seconds_spent(run, stage) if stage == "train" else 0.0  # an evaluation starts again
        try:
            code = self._execute(command, output)
        finally:
            write_seconds(run, stage, before + self._clock() - began)
        if code == EXIT_INTERRUPTED:
            raise Interrupted(f"{run.name}: {stage} was interrupted; run the same command to go on")
        done = is_trained(run) if stage == "train" else is_complete(run)
        if code == EXIT_OK and done:
            return None
        write_seconds(run, stage, 0.0)  # what a failure took says nothing about how long the stage takes
        return Failure(run.name, stage, _reason(run, stage, code, since))


def _expected(run: PlannedRun, done: Sequence[PlannedRun]) -> float | None:
    """Return the seconds that a run will still take, stage by stage: the most that one of its variant took, else any
    that finished; less what its training has taken so far."""
    if not done:
        return None
    like = [r for r in done if r.variant == run.variant] or done
    most = {stage: max(seconds_spent(r, stage) for r in like) for stage in STAGES}
    train = 0.0 if is_trained(run) else max(0.0, most["train"] - seconds_spent(run, "train"))
    return train + most["evaluate"]


def _reason(run: PlannedRun, stage: str, code: int, since: float) -> str:
    """Say why a stage failed: what the run's status says, else the error in its output, else how it ended."""
    status = read_json(run.folder / "status.json")
    if stage == "train" and status.get("status") == "failed" and float(status.get("time", 0.0)) >= since:
        return str(status.get("reason", ""))
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code == EXIT_OK:
        return "ended well, but what it should have written is not there"
    said = last_lines(run.folder / "logs" / f"{stage}.txt") or [f"exit code {code}"]
    last_error = max((n for n, line in enumerate(said) if line.startswith("error")), default=len(said) - 1)
    return " ".join(line.strip() for line in said[last_error:]).removeprefix("error: ")
