"""Checkpoints are whole or not there, and a damaged one is passed over."""

from __future__ import annotations

import errno
import json
import logging
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from deepspec.checkpoint import store as store_module
from deepspec.checkpoint.aside import set_aside
from deepspec.checkpoint.atomic import new_folder, write_text
from deepspec.checkpoint.fingerprint import check_fingerprints, fingerprints
from deepspec.checkpoint.state import Progress, TrainState
from deepspec.checkpoint.store import newest_drafter
from deepspec.data.samples import PrepareReport, SampleSet
from deepspec.drafters.files import save_drafter
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
    assert store.newest() == "step-000015"
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


def test_what_comes_after_a_damaged_one_is_kept(tmp_path: Path) -> None:
    """A run that fell back saves at a smaller step than the damaged one's; that is what the next start goes on from."""
    store = toy.make_store(tmp_path, toy.make_drafter(), keep=1)
    store.save(state(), Progress(step=10))
    kept = toy.make_store(tmp_path, toy.make_drafter(), keep=2)
    (kept.save(state(), Progress(step=15)) / "state.json").unlink()
    assert store.newest() == "step-000010"
    assert (tmp_path / "latest").read_text() == "step-000010\n", "evaluate reads the one that training goes on from"
    store.save(state(), Progress(step=12))
    assert names(tmp_path) == ["latest", "step-000012", "step-000015-damaged-1"]
    assert store.newest() == "step-000012"


def test_the_one_just_written_is_never_pruned(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path, toy.make_drafter(), keep=1)
    store.save(state(), Progress(step=10))
    store.save(state(), Progress(step=5))
    assert names(tmp_path) == ["latest", "step-000005"]


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


def test_the_newest_whole_drafter_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Evaluation and export take what resuming takes; a damaged optimiser does not concern them."""
    with pytest.raises(PackageError, match="holds no checkpoint"):
        newest_drafter(tmp_path)
    store = toy.make_store(tmp_path / "checkpoints", toy.make_drafter(), keep=3)
    older, newer, newest = (store.save(state(), Progress(step=step)) for step in (5, 10, 15))
    (newer / "optimizer.safetensors").unlink()
    (tmp_path / "checkpoints" / "step-000015 copy").mkdir()
    assert newest_drafter(tmp_path) == newest
    file = newest / "drafter.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        assert newest_drafter(tmp_path) == newer
    assert "step-000015 is damaged: drafter.safetensors was changed" in caplog.text
    with pytest.raises(PackageError, match=r"step-000015 is damaged .*; give another one"):
        newest_drafter(newest)
    for folder in (older, newer):
        (folder / "drafter.json").unlink()
    with pytest.raises(PackageError, match="every checkpoint in .* is damaged"):
        newest_drafter(tmp_path)


def test_a_pair_of_files_alone_has_no_checksums(tmp_path: Path) -> None:
    save_drafter(tmp_path, toy.make_drafter(), toy.ToyConfig(), toy.INFO)
    assert newest_drafter(tmp_path) == tmp_path


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


def test_folders_by_other_names_are_left_alone(tmp_path: Path) -> None:
    """A copy that somebody keeps is neither resumed from, nor counted, nor deleted."""
    store = toy.make_store(tmp_path, toy.make_drafter(), keep=1)
    shutil.copytree(store.save(state(), Progress(step=5)), tmp_path / "step-000005-best")
    store.save(state(), Progress(step=10))
    assert store.newest() == "step-000010"
    assert names(tmp_path) == ["latest", "step-000005-best", "step-000010"]


def test_starting_anew_sets_the_earlier_start_aside(tmp_path: Path) -> None:
    """Together, as run folders that evaluate can read; what belongs to no start stays."""
    set_aside(tmp_path)
    assert names(tmp_path) == []
    files = ("metrics.jsonl", "wandb-id.txt", "config.yaml")
    for number in (1, 2):
        store = toy.make_store(tmp_path / "checkpoints", toy.make_drafter())
        store.save(state(), Progress(step=5))
        for name in (*files, "status.json"):
            (tmp_path / name).write_text(f"{name} {number}")
        set_aside(tmp_path)
        assert store.newest() is None
        assert names(tmp_path / f"before-{number}") == sorted(["checkpoints", *files])
        assert all((tmp_path / f"before-{number}" / name).read_text() == f"{name} {number}" for name in files)
    assert names(tmp_path) == ["before-1", "before-2", "status.json"]
    assert newest_drafter(tmp_path / "before-1").name == "step-000005"


def test_atomic_writes(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "b") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert names(tmp_path) == ["a"]


TOY = toy.ToyConfig()
CONFIG: dict[str, Any] = {
    "seed": 0,
    "drafter": {"gamma": 2, "width": 12, "ce": 0.1},
    "target": {"path": "a", "dtype": "auto"},
    "data": {"train": "train.jsonl", "limit": None},
    "optim": {"lr": 1.0, "betas": (0.9, 0.95)},
    "generate": {"temperature": 0.0},
    "train": {"epochs": 2, "log_every": 10},
}


def prints(
    config: toy.ToyConfig = TOY, *, token: int = 1, steps: int = 4, weights: str = "a", **changes: Any
) -> dict[str, dict[str, Any]]:
    """Fingerprint a toy run; ``changes`` are whole groups or settings laid over ``CONFIG``."""
    flat = [torch.full((3,), token, dtype=torch.int32), torch.ones(3, dtype=torch.uint8), torch.tensor([0, 3])]
    samples = SampleSet(flat[0], flat[1], flat[2], ["s"], [""], PrepareReport())
    info = replace(toy.INFO, fingerprint=weights)
    return fingerprints(config.build(info, (1, 2), 3), info, samples, steps, CONFIG | changes)


def warned(caplog: pytest.LogCaptureFixture, current: dict[str, Any]) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_fingerprints(json.loads(json.dumps(prints())), current)
    return caplog.text


def test_changes_that_do_not_matter_go_unmentioned(caplog: pytest.LogCaptureFixture) -> None:
    target, data = {"path": "b", "dtype": "auto"}, {"train": "moved.jsonl", "limit": None}
    assert warned(caplog, prints()) == ""
    assert warned(caplog, prints(target=target, data=data, train={"epochs": 2, "log_every": 1})) == ""


def test_changes_of_the_course_are_named(caplog: pytest.LogCaptureFixture) -> None:
    drafter, optim = CONFIG["drafter"] | {"ce": 0.2}, CONFIG["optim"] | {"lr": 2.0}
    said = warned(caplog, prints(drafter=drafter, optim=optim))
    assert "drafter.ce=0.2 (was 0.1), optim.lr=2.0 (was 1.0)" in said
    said = warned(caplog, prints(token=2, data={"train": "other.jsonl", "limit": None}))
    assert 'the samples of data.train, data.train="other.jsonl" (was "train.jsonl")' in said
    said = warned(caplog, prints(steps=8, train={"epochs": 4}))
    assert "the number of steps, train.epochs=4 (was 2)" in said
    assert "the samples of data.train;" in warned(caplog, prints(token=2)), "the same file with other content"


def test_the_seed_of_the_data_is_the_seed_unless_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    data = CONFIG["data"]
    assert warned(caplog, prints(data=data | {"seed": None})) == ""
    assert warned(caplog, prints(data=data | {"seed": 0})) == "", "the same seed by name"
    assert "data.seed=1 (was 0)" in warned(caplog, prints(data=data | {"seed": 1}))
    said = warned(caplog, prints(seed=1, data=data | {"seed": 0}))
    assert "seed=1 (was 0)" in said and "data.seed" not in said


def test_another_drafter_or_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter's tensors changed.*: drafter\.width=8 \(was 12\).*paths\.run"):
        check_fingerprints(prints(), prints(toy.ToyConfig(width=8), drafter=CONFIG["drafter"] | {"width": 8}))
    with pytest.raises(ConfigError, match=r"block conventions changed.*: drafter\.gamma=3 \(was 2\)"):
        check_fingerprints(prints(), prints(toy.ToyConfig(gamma=3), drafter=CONFIG["drafter"] | {"gamma": 3}))
    with pytest.raises(ConfigError, match=r'the target changed.*: target\.path="b" \(was "a"\)'):
        check_fingerprints(prints(), prints(weights="b", target={"path": "b", "dtype": "auto"}))


def test_a_checkpoint_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_fingerprints({"drafter": "0123"}, prints())
    assert "go unnoticed" in caplog.text


def test_description_is_json_with_checksums(tmp_path: Path) -> None:
    folder = toy.make_store(tmp_path, toy.make_drafter()).save(state(), Progress(step=5))
    description = json.loads((folder / "state.json").read_text())
    assert description["version"] == 1
    assert set(description["files"]) == {"drafter.safetensors", "drafter.json", "optimizer.safetensors"}
    assert torch.tensor(description["files"]["drafter.json"]["bytes"]) > 0
