"""Checkpoints are whole or not there, and a damaged one is passed over."""

from __future__ import annotations

import errno
import json
import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from deepspec.checkpoint import store as store_module
from deepspec.checkpoint.atomic import new_folder, write_text
from deepspec.checkpoint.fingerprint import check_fingerprints, fingerprints
from deepspec.checkpoint.state import Progress, TrainState
from deepspec.drafters.files import newest_drafter
from deepspec.errors import ConfigError, PackageError, TrainingError
from tests.unit.engine import toy

ROOT = Path(__file__).parents[3]


def state() -> TrainState:
    parameters = {n: p.detach() for n, p in toy.make_drafter().named_parameters()}
    moments = {n: {"exp_avg": p * 0.5, "exp_avg_sq": p * p} for n, p in parameters.items()}
    return TrainState(parameters, moments, optimizer_step=3, loss_scale={"scale": 8.0, "good_steps": 2.0})


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_round_trip_and_pruning(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter(), keep=2)
    for step in (5, 10, 15):
        store.save(state(), Progress(step=step, epoch=1, samples=4 * step, skipped_steps=1))
    assert names(tmp_path) == ["latest", "step-000010", "step-000015"]
    assert store.newest() == "step-000015" == newest_drafter(tmp_path.parent / tmp_path.name / "step-000015").name
    loaded = store.load("step-000015")
    assert loaded.progress == Progress(step=15, epoch=1, samples=60, skipped_steps=1)
    assert loaded.state.optimizer_step == 3
    assert loaded.state.loss_scale == {"scale": 8.0, "good_steps": 2.0}
    assert all(loaded.state.parameters[n].equal(p) for n, p in state().parameters.items())
    assert all(loaded.state.moments[n]["exp_avg_sq"].equal(m["exp_avg_sq"]) for n, m in state().moments.items())


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "torn json"])
def test_damaged_newest_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter())
    store.save(state(), Progress(step=5))
    newest = store.save(state(), Progress(step=10))
    file = newest / "drafter.safetensors"
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-10])
    elif damage == "changed":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        file.unlink()
    else:
        (newest / "state.json").write_text('{"format": "deepspec-ch')
    with caplog.at_level(logging.WARNING):
        assert store.newest() == "step-000005"
    assert "step-000010" in caplog.text
    assert "step-000005" in caplog.text


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "..", "a/b", "link"])
def test_names_that_lead_out_of_the_folder_are_not_read(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter())
    store.save(state(), Progress(step=5))
    newest = store.save(state(), Progress(step=10))
    (newest / "link").symlink_to("/etc/hostname")
    description = json.loads((newest / "state.json").read_text())
    description["files"] = {name: {"bytes": 1, "crc32": 1}, **description["files"]}
    (newest / "state.json").write_text(json.dumps(description))
    with caplog.at_level(logging.WARNING):
        assert store.newest() == "step-000005"
    assert "not a file beside it" in caplog.text or "leads out of its folder" in caplog.text


def test_only_damaged_ones(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter())
    (store.save(state(), Progress(step=5)) / "state.json").unlink()
    with pytest.raises(PackageError, match=r"train\.resume=false"):
        store.newest()


FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
)


@pytest.mark.parametrize("error", FULL)
def test_full_disk_keeps_older_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter())
    store.save(state(), Progress(step=5))

    def full(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(store_module, "save_file", full)
    with pytest.raises(TrainingError, match="No space left") as caught:
        store.save(state(), Progress(step=10))
    assert "move the run folder to another disk and set paths.run to it" in str(caught.value)
    assert caught.value.exit_code == 1
    assert "step-000010" in str(caught.value)
    assert names(tmp_path) == ["latest", "step-000005"]
    assert store.newest() == "step-000005"


def test_write_that_really_fails(tmp_path: Path) -> None:
    """A process that may not write files above 2 kB stands for a full disk."""
    program = (
        "import resource, sys; from pathlib import Path; from tests.unit.checkpoint import test_store as t; "
        "from deepspec.errors import TrainingError; folder = Path(sys.argv[1]); "
        "store = t.toy.make_store(folder, t.toy.make_drafter()); store.save(t.state(), t.Progress(step=5)); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: store.save(t.state(), t.Progress(step=10))\n"
        "except TrainingError as error: sys.exit(error.exit_code)"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 1
    assert names(tmp_path) == ["latest", "step-000005"]


def test_left_over_temporary_folder_is_ignored(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter())
    store.save(state(), Progress(step=5))
    (tmp_path / "step-000010.tmp").mkdir()
    assert store.newest() == "step-000005"
    store.save(state(), Progress(step=10))
    assert names(tmp_path) == ["latest", "step-000005", "step-000010"]


def test_starting_anew_sets_older_ones_aside(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "checkpoints", toy.make_drafter())
    store.set_aside()
    for _ in range(2):
        store.save(state(), Progress(step=5))
        store.set_aside()
        assert store.newest() is None
    assert names(tmp_path) == ["checkpoints-before-1", "checkpoints-before-2"]


def test_atomic_writes(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "b") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert names(tmp_path) == ["a"]


def test_fingerprints(caplog: pytest.LogCaptureFixture) -> None:
    saved = fingerprints({"drafter": {"a": 1}, "optim": {"lr": 1.0}})
    check_fingerprints(saved, saved)
    with caplog.at_level(logging.WARNING):
        check_fingerprints(saved, fingerprints({"drafter": {"a": 1}, "optim": {"lr": 2.0}}))
    assert "optim" in caplog.text
    with pytest.raises(ConfigError, match=r"drafter changed.*paths\.run"):
        check_fingerprints(saved, fingerprints({"drafter": {"a": 2}, "optim": {"lr": 1.0}}))


def test_description_is_json_with_checksums(tmp_path: Path) -> None:
    folder = toy.make_store(tmp_path, toy.make_drafter()).save(state(), Progress(step=5))
    description = json.loads((folder / "state.json").read_text())
    assert description["version"] == 1
    assert set(description["files"]) == {"drafter.safetensors", "drafter.json", "optimizer.safetensors"}
    assert torch.tensor(description["files"]["drafter.json"]["bytes"]) > 0
