"""The whole command ``deepspec.train`` on a tiny target: run, resume, signals, launchers, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.checkpoint.store import newest_drafter
from deepspec.drafters.files import load_drafter
from tests.commands.tiny_run import overrides
from tests.helpers import EOS_TOKEN_ID, tiny_tokenizer
from tests.numerics.launch import ROOT, environment, free_port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def arguments(folder: Path) -> list[str]:
    return overrides(folder)


def train(arguments: list[str], *extra: str, launcher: tuple[str, ...] = (), **env: str) -> int:
    command = list(launcher) or [sys.executable, "-m", "deepspec.train"]
    done = subprocess.run([*command, *arguments, *extra], cwd=ROOT, env=environment(**env), timeout=280, check=False)
    return done.returncode


def status(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "status.json").read_text())
    return found


def weights(run: Path) -> dict[str, Any]:
    return load_file(newest_drafter(run) / "drafter.safetensors")


def newest_step(run: Path) -> int:
    return int(newest_drafter(run).name.removeprefix("step-"))


@pytest.fixture(scope="module")
def straight(folder: Path, arguments: list[str]) -> Path:
    """A plain run of six steps."""
    run = folder / "straight"
    assert train(arguments, f"paths.run={run}", "train.validate_every=3") == 0
    return run


def test_run_folder(straight: Path) -> None:
    assert status(straight)["status"] == "finished"
    assert (straight / "checkpoints" / "latest").read_text().strip() == "step-000006"
    lines = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert {"train", "validation"} == {line["kind"] for line in lines}
    assert (straight / "config.yaml").is_file()
    assert load_drafter(newest_drafter(straight)).conventions.target_layer_ids == (1, 2, 3)


def test_a_reduced_vocabulary_is_chosen_from_the_data(folder: Path, arguments: list[str]) -> None:
    run = folder / "reduced"
    assert train(arguments, f"paths.run={run}", "drafter.draft_vocab_size=20", "train.max_steps=2") == 0
    drafter = load_drafter(newest_drafter(run))
    assert drafter.d2t is not None
    ids = (drafter.d2t + torch.arange(20)).tolist()
    vocabulary = tiny_tokenizer().get_vocab()
    assert {EOS_TOKEN_ID, *(vocabulary[letter] for letter in "as ir")} <= set(ids)
    assert "draft vocabulary: 20 of 97 tokens" in "".join(p.read_text() for p in (run / "logs").iterdir())


@pytest.mark.slow
def test_a_fitted_start_is_made_once(folder: Path, arguments: list[str]) -> None:
    """A run that goes on neither fits again nor ends elsewhere, though other samples are in its memory."""
    fit = ("drafter.init=fitted", "drafter.num_layers=2", "drafter.fit_samples=8")
    fitted = (*fit, "features.memory_gib=1", "data.limit=8", "train.epochs=4", "train.save_every=2")
    whole, resumed = folder / "fitted", folder / "fitted-resumed"
    assert train(arguments, *fitted, f"paths.run={whole}", "train.max_steps=4") == 0
    assert "fitting the first layer to 8 samples" in "".join(p.read_text() for p in (whole / "logs").iterdir())
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    shutil.rmtree(resumed / "checkpoints" / "step-000004")  # as if it had been killed after step 2
    (resumed / "checkpoints" / "latest").write_text("step-000002\n")
    assert train(arguments, *fitted, f"paths.run={resumed}", "train.max_steps=4") == 0
    said = "".join(p.read_text() for p in (resumed / "logs").iterdir())
    assert "step 2" in said and "fitting" not in said
    expected = weights(whole)
    assert all(value.equal(expected[name]) for name, value in weights(resumed).items())


@pytest.mark.slow
def test_a_packed_run_goes_on_as_if_nothing_had_happened(folder: Path, arguments: list[str]) -> None:
    """More samples a step than rows, so that steps differ in their micro-batches; features stay in memory."""
    packed = ("data.row_tokens=192", "data.anchor_share=0.5", "engine.micro_batch_size=1", "engine.global_batch_size=6",
              "features.memory_gib=1", "train.epochs=2", "train.save_every=4", "train.max_steps=8")  # fmt: skip
    whole, resumed = folder / "packed", folder / "packed-resumed"
    assert train(arguments, *packed, f"paths.run={whole}") == 0
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    shutil.rmtree(resumed / "checkpoints" / "step-000008")  # as if it had been killed after step 4
    (resumed / "checkpoints" / "latest").write_text("step-000004\n")
    assert train(arguments, *packed, f"paths.run={resumed}") == 0
    expected = weights(whole)
    assert all(value.equal(expected[name]) for name, value in weights(resumed).items())


def test_stopped_before_the_first_step(folder: Path, arguments: list[str]) -> None:
    """SIGTERM while torch, the target or the samples are loaded: a launcher learns to start the run again."""
    run = folder / "stopped"
    command = [sys.executable, "-m", "deepspec.train", *arguments, f"paths.run={run}"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    deadline = time.monotonic() + 240
    while not (run / "status.json").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    assert status(run)["status"] == "interrupted"
    assert "received SIGTERM" in status(run)["reason"]
    assert not (run / "metrics.jsonl").exists()


def test_interrupted_and_resumed(folder: Path, arguments: list[str]) -> None:
    """SIGTERM ends with 75 after a save; the same command goes on and ends in the weights of a run left alone."""
    run, alone = folder / "interrupted", folder / "alone"
    long = [*arguments, "train.epochs=10", "train.max_steps=40", "train.log_every=1"]  # the signal comes in the middle
    process = subprocess.Popen(
        [sys.executable, "-m", "deepspec.train", *long, f"paths.run={run}"], cwd=ROOT, env=environment()
    )
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    assert status(run)["status"] == "interrupted"
    assert 1 <= newest_step(run) < 40
    for each in (run, alone):
        assert train(long, f"paths.run={each}") == 0
        assert status(each)["status"] == "finished"
        assert newest_step(each) == 40
    expected = weights(alone)
    assert all(value.equal(expected[name]) for name, value in weights(run).items())


def test_a_checkpoint_of_another_drafter_is_refused(folder: Path, arguments: list[str], straight: Path) -> None:
    """What the run was trained with stays on disk, and the message says how to get back to it."""
    run = shutil.copytree(straight, folder / "other-drafter")
    before = (run / "config.yaml").read_bytes()
    command = [sys.executable, "-m", "deepspec.train", *arguments, f"paths.run={run}", "drafter.gamma=4"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=240, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "drafter.gamma=4 (was 3)" in done.stderr
    assert (run / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_other_weights_of_the_loss_go_on_with_a_warning(folder: Path, arguments: list[str], straight: Path) -> None:
    run = shutil.copytree(straight, folder / "other-loss")
    extra = ("drafter.ce=0.3", "train.epochs=2")
    assert train(arguments, f"paths.run={run}", *extra) == 0
    said = "".join(p.read_text() for p in (run / "logs").iterdir())
    assert "drafter.ce=0.3 (was 0.1)" in said
    assert "the number of steps, " in said and "train.epochs=2 (was 1)" in said
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-000008"


@pytest.mark.slow
def test_starting_anew_keeps_the_earlier_start(folder: Path, arguments: list[str], straight: Path) -> None:
    run = shutil.copytree(straight, folder / "anew")
    assert train(arguments, f"paths.run={run}", "train.resume=false", "train.max_steps=2", "drafter.gamma=2") == 0
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-000002"
    for name in ("metrics.jsonl", "config.yaml", "checkpoints/latest"):
        assert (run / "before-1" / name).read_bytes() == (straight / name).read_bytes()
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [2]


@pytest.mark.slow
def test_every_rank_gets_the_first_ones_fit(folder: Path, arguments: list[str]) -> None:
    """Two ranks that start fitted end where one does."""
    fitted = ("drafter.init=fitted", "drafter.num_layers=2", "drafter.fit_samples=8", "engine.micro_batch_size=1")
    one, two = folder / "fitted-one", folder / "fitted-two"
    assert train(arguments, *fitted, f"paths.run={one}", "train.max_steps=2") == 0
    start = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()))
    launcher = (*start, "-m", "deepspec.train")
    assert train(arguments, *fitted, f"paths.run={two}", "train.max_steps=2", launcher=launcher) == 0
    found, expected = weights(two), weights(one)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launchers(folder: Path, arguments: list[str], straight: Path, launcher: str) -> None:
    """Two ranks under either launcher end where one plain rank does."""
    run = folder / launcher
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port"]
        start += [str(free_port()), "-m", "deepspec.train"]
        engine = ["engine=plain", "engine.precision=fp32"]
    else:
        start = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]
        start += [str(free_port()), "--module", "deepspec.train"]
        engine = ["engine=deepspeed", "engine.precision=fp32", "engine.zero_stage=2"]
    sizes = ["engine.micro_batch_size=1", "engine.global_batch_size=4"]
    assert train(arguments, *engine, *sizes, f"paths.run={run}", launcher=tuple(start)) == 0
    assert status(run)["status"] == "finished"
    found, expected = weights(run), weights(straight)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (["target.target_layer_ids=[1,5]"], "target_layer_ids"),
        (["engine.global_batch_size=3"], "global_batch_size"),
        (["target.mask_token_id=97"], "mask_token_id"),
        (["data.path=/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_mistakes_end_with_2(folder: Path, arguments: list[str], extra: list[str], word: str) -> None:
    command = [sys.executable, "-m", "deepspec.train", *arguments, f"paths.run={folder / 'wrong'}", *extra]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=240, check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="ulimit")
def test_full_disk(folder: Path, arguments: list[str]) -> None:
    """Files above 20 kB cannot be written: the save fails with one message and code 1."""
    run = folder / "full"
    assert train(arguments, f"paths.run={run}") == 0
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    program = " ".join([sys.executable, "-m", "deepspec.train", *(f"'{a}'" for a in arguments)])
    shell = f"ulimit -f 20; exec {program} 'paths.run={run}' train.max_steps=9 train.epochs=2"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=ROOT, env=environment(), timeout=240, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before
    assert status(run)["status"] == "failed"


STAND_IN = """#!/usr/bin/env bash
echo "${0##*/} $*" >> "$LAUNCHED"
mkdir -p "$RUN_FOLDER"
echo '{"status": "interrupted", "time": 9e9}' > "$RUN_FOLDER/status.json"
exit 1
"""


def launch(folder: Path, script: str, *words: str, run: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a launch script over a launcher that only writes down its words, as if the run in ``run`` was interrupted."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("torchrun", "deepspeed", "srun", "scontrol"):
        (folder / "bin" / name).write_text(STAND_IN)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": path, "LAUNCHED": str(folder / "launched"), "RUN_FOLDER": str(run)}
    variables = environment(DEEPSPEC_RUNS=str(folder / "runs"), **own, **env)
    command = ["bash", f"launch/{script}", *words]
    return subprocess.run(command, cwd=ROOT, env=variables, timeout=120, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh"])
def test_the_same_launch_goes_on_with_the_run(tmp_path: Path, script: str) -> None:
    """A launch script has no run folder of its own, and reads the exit code from the one that the ranks use."""
    cases: list[tuple[Path, list[str], dict[str, str]]] = [
        (tmp_path / "runs" / "quickstart-smollm2", [], {}),
        (tmp_path / "runs" / "mine", [], {"DEEPSPEC_RUN_ID": "mine"}),
        (tmp_path / "else where", [f"paths.run='{tmp_path / 'else where'}'"], {}),
    ]
    for run, words, env in cases:
        done = launch(tmp_path, script, "2", "recipe=quickstart", *words, run=run, **env)
        assert done.returncode == 75, done.stderr
    wrong = launch(tmp_path, script, "2", "recipe=quickstart", "sed=1", run=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: sed: no such key; did you mean seed")
    helped = launch(tmp_path, script, "2", "--help", run=tmp_path)
    assert helped.returncode == 0
    assert "recipe" in helped.stdout
    assert len((tmp_path / "launched").read_text().splitlines()) == 3


@pytest.mark.parametrize(("restarts", "resume"), [("", "false"), ("0", "false"), ("2", "true")])
def test_a_requeued_job_goes_on_whatever_its_command_says(tmp_path: Path, restarts: str, resume: str) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
    if restarts:
        slurm["SLURM_RESTART_COUNT"] = restarts
    run, words = (
        tmp_path / "runs" / "slurm-7",
        ["recipe=quickstart", "engine.global_batch_size=8", "train.resume=false"],
    )
    done = launch(tmp_path, "slurm.sbatch", *words, run=run, **slurm)
    assert done.returncode == 75, done.stderr
    said = (tmp_path / "launched").read_text().splitlines()
    assert said[-1] == "scontrol requeue 7"
    words = next(line for line in said if line.startswith("srun")).rpartition(" deepspec ")[2].split()
    command = [sys.executable, "-m", "deepspec.train", "--cfg", "job", *words]
    config = subprocess.run(command, cwd=ROOT, env=environment(), timeout=120, check=True, capture_output=True)
    assert f"  resume: {resume}\n" in config.stdout.decode()


OTHER_DRAFTERS = {
    "quickstart_dflash": (
        "drafter.num_layers=1",
        "drafter.gamma=3",
        "drafter.init=random",
        "drafter.draft_vocab_size=20",
    ),
    "quickstart_eagle3": ("drafter.ttt_length=3", "drafter.draft_vocab_size=20"),
    "quickstart_mtp": ("drafter.draft_vocab_size=null",),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(OTHER_DRAFTERS))
def test_every_drafter_trains_decodes_and_exports(folder: Path, arguments: list[str], recipe: str) -> None:
    run = folder / recipe
    common = [a for a in arguments if not a.startswith(("drafter.", "recipe=", "paths.run="))]
    assert train([f"recipe={recipe}", *common, f"paths.run={run}"], *OTHER_DRAFTERS[recipe], "train.max_steps=3") == 0
    few = (f"run={run}", f"data.test={folder / 'validation.jsonl'}")
    short = ("evaluate.max_new_tokens=6", "evaluate.timing_prompts=1", "evaluate.timing_new_tokens=6")
    for command, extra in (("evaluate", short), ("export", ("export.verify_prompts=1", "export.profile=bf16"))):
        launcher = (sys.executable, "-m", f"deepspec.{command}")
        assert train([*few, *extra], launcher=launcher) == 0
    found = json.loads((run / "evaluation" / "report.json").read_text())
    assert not found["scores"]["lossless"]["differing"]
