"""Checkpoints of a run: written whole or not at all, readable by any engine on any number of ranks.

checkpoints/
  step-000500/ drafter.safetensors drafter.json   the drafter, as export and evaluation read it
               optimizer.safetensors              "<moment>/<parameter>"
               state.json                         counters, loss scale, size and CRC-32 of every file
  latest                                          name of the newest folder
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from deepspec.checkpoint.atomic import free_path, new_folder, write_json, write_text
from deepspec.checkpoint.state import Progress, TrainState
from deepspec.drafters.files import POINTER, TENSORS, read_tensors, save_drafter
from deepspec.errors import PackageError, TrainingError
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import Drafter, DrafterConfig

log = get_logger(__name__)

FORMAT = "deepspec-checkpoint"
VERSION = 1
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    folder: Path
    state: TrainState
    progress: Progress


class CheckpointStore:
    """The ``checkpoints`` folder of one run. Only the first rank writes."""

    def __init__(
        self,
        folder: Path,
        *,
        drafter: Drafter,
        config: DrafterConfig,
        info: TargetInfo,
        fingerprints: Mapping[str, Any],
        keep: int,
    ) -> None:
        self.folder = folder
        self._drafter, self._config, self._info = drafter, config, info
        self.fingerprints = fingerprints
        self._keep = keep

    def save(self, state: TrainState, progress: Progress) -> Path:
        """Write one checkpoint and let the oldest go.

        Raises:
            TrainingError: the disk is full or cannot be written; older checkpoints are untouched.
        """
        path = self.folder / f"step-{progress.step:06d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with new_folder(path) as temporary:
                self._write(temporary, state, progress)
            write_text(self.folder / POINTER, path.name + "\n")
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
            raise TrainingError(
                f"checkpoint {path} could not be written: {error}; older checkpoints are intact. "
                "Free some space or set paths.run to another disk, then run the same command again to resume"
            ) from error
        self._prune(path)
        return path

    def _write(self, folder: Path, state: TrainState, progress: Progress) -> None:
        save_drafter(folder, self._drafter, self._config, self._info, step=progress.step, tensors=state.parameters)
        flat = {f"{key}/{name}": value for name, group in state.moments.items() for key, value in group.items()}
        save_file(flat, folder / OPTIMIZER, metadata={"format": "pt"})
        description = {
            "format": FORMAT,
            "version": VERSION,
            "progress": asdict(progress),
            "optimizer_step": state.optimizer_step,
            "loss_scale": state.loss_scale,
            "fingerprints": self.fingerprints,
            "files": {file.name: {"bytes": file.stat().st_size, "crc32": _crc32(file)} for file in folder.iterdir()},
        }
        write_json(folder / STATE, description)

    def _prune(self, written: Path) -> None:
        """Keep the one just written, whatever its number, and the newest of the others."""
        others = [folder for folder in self._folders() if folder != written]
        for folder in others[max(0, self._keep - 1) :]:
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        """Return the checkpoint folders, newest first; temporary ones and copies by other names are not among them."""
        if not self.folder.exists():
            return []
        found = [(int(match[1]), p) for p in self.folder.iterdir() if (match := NAME.fullmatch(p.name)) and p.is_dir()]
        return [path for _, path in sorted(found, reverse=True)]

    def newest(self) -> str | None:
        """Return the name of the newest whole checkpoint, None when there is none.

        Damaged ones that are newer get another name: the steps that they stand for come again.

        Raises:
            PackageError: there are checkpoints, and every one of them is damaged.
        """
        damaged: list[Path] = []
        for folder in self._folders():
            try:
                _check(folder)
            except PackageError as error:
                log.warning("checkpoint %s is damaged: %s", folder, error)
                damaged.append(folder)
                continue
            if damaged:
                self._fall_back(damaged, folder.name)
            return folder.name
        if damaged:
            raise PackageError(f"every checkpoint in {self.folder} is damaged; start anew with train.resume=false")
        return None

    def _fall_back(self, damaged: list[Path], name: str) -> None:
        for folder in damaged:
            aside = folder.rename(free_path(folder.with_name(f"{folder.name}-damaged")))
            log.warning("falling back to the one before: %s; the damaged one is now %s", name, aside)
        write_text(self.folder / POINTER, name + "\n")

    def read_fingerprints(self, name: str) -> dict[str, Any]:
        """Return what the checkpoint ``name`` was trained on and with."""
        return dict(_read_state(self.folder / name).get("fingerprints", {}))

    def load(self, name: str) -> Checkpoint:
        """Read the checkpoint ``name``."""
        folder = self.folder / name
        description = _read_state(folder)
        moments: dict[str, dict[str, Any]] = {}
        for key, value in read_tensors(folder / OPTIMIZER).items():
            moment, parameter = key.split("/", 1)
            moments.setdefault(parameter, {})[moment] = value
        state = TrainState(
            parameters=read_tensors(folder / TENSORS),
            moments=moments,
            optimizer_step=int(description["optimizer_step"]),
            loss_scale=dict(description["loss_scale"]),
        )
        return Checkpoint(folder, state, Progress(**description["progress"]))


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackageError(f"{STATE} cannot be read: {error}") from error
    if (description.get("format"), description.get("version")) != (FORMAT, VERSION):
        raise PackageError(f"{folder / STATE}: this program reads {FORMAT} version {VERSION}")
    return description


def _check(folder: Path) -> None:
    """Compare every file with the size and checksum written beside it."""
    for name, expected in _read_state(folder)["files"].items():
        path = folder / name
        if not path.exists():
            raise PackageError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise PackageError(f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written")
        if _crc32(path) != expected["crc32"]:
            raise PackageError(f"{name} was changed after it was written")


def _crc32(path: Path, chunk_bytes: int = 1 << 22) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            value = zlib.crc32(chunk, value)
    return value
