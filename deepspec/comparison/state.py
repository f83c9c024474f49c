"""What of a run is done, read from its folder: nothing is trained or evaluated twice.

A run folder holds what training and evaluation write, and ``comparison.json``: the seconds that each stage took, over
all calls that it went on in.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from deepspec.checkpoint.atomic import write_json
from deepspec.config.resolve import load_config, to_plain
from deepspec.errors import DeepSpecError
from deepspec.evaluation.report import FORMAT, VERSION
from deepspec.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from deepspec.comparison.plan import Config, PlannedRun

log = get_logger(__name__)

JOURNAL = "comparison.json"
STAGES = ("train", "evaluate")
_LATER_GROUPS = ("evaluate", "export", "plan", "tracker", "paths")
_LATER_KEYS = ("mode", "show", "out", "data.test", "train.resume")
"""What may change without another training."""


def must_start_anew(run: PlannedRun) -> bool:
    """Return whether the folder holds a training with other settings, which is not to be gone on with."""
    found = _read_config(run.folder)
    return found is not None and _of_training(found) != _of_training(run.config)


def is_trained(run: PlannedRun) -> bool:
    """Return whether the training has finished, with the settings wanted."""
    found = _read_config(run.folder)
    finished = read_json(run.folder / "status.json").get("status") == "finished"
    return finished and found is not None and not must_start_anew(run) and newest_checkpoint(run) is not None


def is_complete(run: PlannedRun) -> bool:
    """Return whether the run is trained, and its newest checkpoint evaluated with the settings wanted."""
    return is_trained(run) and bool(read_report(run))


def newest_checkpoint(run: PlannedRun) -> Path | None:
    """Return the folder of the newest checkpoint, None without one."""
    try:
        name = (run.folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = run.folder / "checkpoints" / name
    return folder if name and (folder / "state.json").is_file() else None


def read_report(run: PlannedRun) -> dict[str, Any]:
    """Return the evaluation's record; empty when it is missing, older than the checkpoint, or of other settings."""
    path, checkpoint = run.folder / "evaluation" / "report.json", newest_checkpoint(run)
    record = read_json(path)
    if checkpoint is None or (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        return {}
    subject, scores = record.get("subject", {}), record.get("scores", {})
    of_this = str(subject.get("drafter", "")).rpartition("/")[2] == checkpoint.name
    wanted = (_as_json(run.config["evaluate"]), run.config["data"]["test"])
    same = (scores.get("settings"), subject.get("data")) == wanted
    newer = path.stat().st_mtime >= (checkpoint / "state.json").stat().st_mtime
    return record if of_this and same and newer else {}


def seconds_spent(run: PlannedRun, stage: str) -> float:
    """Return the wall-clock seconds of a stage that has ended well, or may go on; 0 where nothing is known."""
    value = read_json(run.folder / JOURNAL).get(stage, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def write_seconds(run: PlannedRun, stage: str, seconds: float) -> None:
    """Note the seconds of a stage."""
    known = {name: seconds_spent(run, name) for name in STAGES}
    write_json(run.folder / JOURNAL, {"version": 2, **known, stage: seconds})


def read_json(path: Path) -> dict[str, Any]:
    """Return an object from a JSON file, empty when it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_config(folder: Path) -> Config | None:
    """Return the settings of the training in a folder, None without one.

    Keys that were added since have their defaults; what this version does not read as a whole is taken as it stands.
    """
    path = folder / "config.yaml"
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    try:
        value = to_plain(load_config(path))
    except DeepSpecError as error:
        log.debug("%s: %s", path, error)
    return value if isinstance(value, dict) else None


def _of_training(config: Config) -> Any:
    """Return the part of a configuration that shapes the training, in the types of JSON."""
    kept = {name: value for name, value in config.items() if name not in (*_LATER_GROUPS, *_LATER_KEYS)}
    for name in (n for n in _LATER_KEYS if "." in n):
        group, _, key = name.partition(".")
        kept[group] = {k: v for k, v in dict(kept.get(group) or {}).items() if k != key}
    return _as_json(kept)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
