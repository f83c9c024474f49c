"""Where metrics are written: ``metrics.jsonl`` always, Weights & Biases when asked for."""

from __future__ import annotations

import json
import math
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from deepspec.checkpoint.atomic import write_text
from deepspec.errors import ConfigError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deepspec.config.schema import TrackerConfig

log = get_logger(__name__)


class Tracker(Protocol):
    """Receives one line of metrics at a time, on the first rank."""

    def resume(self, step: int) -> None:
        """Forget what was written past ``step``: it will come again."""
        ...

    def write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write a line; ``kind`` is ``train`` or ``validation``."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonLines:
    """``metrics.jsonl`` in the run folder: one JSON object a line, with ``step`` and ``kind``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def resume(self, step: int) -> None:
        """Keep the lines up to ``step``; a torn last line goes too."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) != len(lines):
            write_text(self._path, "".join(line + "\n" for line in kept))

    def write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Append one line."""
        line = json.dumps({"step": step, "kind": kind, **{k: _finite(v) for k, v in metrics.items()}})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def close(self) -> None:
        """Nothing is held open."""


class Wandb:
    """Weights & Biases. The API key comes from the environment; offline runs land in the run folder."""

    def __init__(self, folder: Path, config: TrackerConfig, run_config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "tracker=wandb needs the package wandb: pip install wandb, or set tracker=none"
            ) from error
        identity = folder / "wandb-id.txt"
        run_id = identity.read_text(encoding="utf-8").strip() if identity.exists() else secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                mode=config.mode,
                tags=list(config.tags),
                dir=str(folder),
                id=run_id,
                name=folder.name,
                resume="allow",
                config=dict(run_config),
            )
        except Exception as error:
            raise ConfigError(
                f"W&B could not start: {error}; set WANDB_API_KEY, or tracker.mode=offline, or tracker=none"
            ) from error
        write_text(identity, run_id + "\n")
        self._first_step = 0

    def resume(self, step: int) -> None:
        """Send nothing that W&B has already: it keeps the first value of a step."""
        self._first_step = step

    def write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Log one line; a list becomes one value a position, counted from 1."""
        if step <= self._first_step:
            return
        flat: dict[str, Any] = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                flat |= {f"{kind}/{name}/{position}": v for position, v in enumerate(value, start=1)}
            elif value is not None:
                flat[f"{kind}/{name}"] = value
        self._run.log(flat, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def resume(self, step: int) -> None:
        """Tell each."""
        for tracker in self._trackers:
            tracker.resume(step)

    def write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        """Write to each."""
        for tracker in self._trackers:
            tracker.write(step, kind, metrics)

    def close(self) -> None:
        """Close each."""
        for tracker in self._trackers:
            tracker.close()


def make_tracker(run: Path, config: TrackerConfig, run_config: Mapping[str, Any], *, is_first: bool) -> Tracker:
    """Build the trackers; ranks other than the first get one that writes nothing."""
    if not is_first:
        return Trackers([])
    run.mkdir(parents=True, exist_ok=True)
    trackers: list[Tracker] = [JsonLines(run / "metrics.jsonl")]
    if config.name == "wandb":
        trackers.append(Wandb(run, config, run_config))
    return Trackers(trackers)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _finite(value: Any) -> Any:
    """Replace what JSON has no word for by null."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
