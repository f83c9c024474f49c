"""Runs of a made-up study, and a stand-in for the commands that writes what they would write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from deepspec.comparison.plan import PlannedRun
from deepspec.config.study import CompareCommand, StudyConfig, StudyPaths, VariantConfig
from deepspec.errors import Interrupted

EVALUATE = {"limit": 2, "max_new_tokens": 8}


def planned(
    parent: Path, variant: str = "a", seed: int = 0, *, lr: float = 0.1, evaluate: dict[str, Any] = EVALUATE
) -> PlannedRun:
    """Return one run whose configuration is a handful of settings."""
    folder = parent / f"{variant}-seed{seed}"
    config = {
        "recipe": variant,
        "seed": seed,
        "mode": "all",
        "data": {"train": "train.jsonl", "test": "test.jsonl", "limit": 4, "seed": 0},
        "optim": {"lr": lr, "betas": [0.9, 0.95]},
        "train": {"epochs": 1, "max_steps": None, "resume": True},
        "engine": {"global_batch_size": 4},
        "evaluate": evaluate,
        "paths": {"run": str(folder)},
    }
    train = ("python", "-m", "deepspec.train", f"paths.run={folder}")
    return PlannedRun(variant, seed, folder, train, ("python", "-m", "deepspec.evaluate", f"run={folder}"), config)


def study(**variants: Sequence[int]) -> CompareCommand:
    """Return a study of variants with their seeds; the first is the baseline."""
    made = {name: VariantConfig(seeds=tuple(seeds)) for name, seeds in variants.items()}
    config = StudyConfig(name="s", recipe="r", variants=made, baseline=next(iter(made)))
    return CompareCommand(study=config, paths=StudyPaths(runs="runs"))


def write_status(run: PlannedRun, status: str, reason: str = "", time: float = 1e12) -> None:
    """Write what a training says about how it stands."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "status.json").write_text(json.dumps({"status": status, "reason": reason, "time": time}))


def write_training(run: PlannedRun, *, seconds: float = 120.0, step: int = 6) -> None:
    """Write what a finished training leaves."""
    checkpoint = run.folder / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint.parent / "latest").write_text(checkpoint.name + "\n")
    (checkpoint / "state.json").write_text(json.dumps({"progress": {"step": step, "seconds": seconds}}))
    tensors = {"layer.weight": torch.zeros(3, 4), "norm.weight": torch.zeros(4), "d2t": torch.zeros(9).long()}
    save_file(tensors, checkpoint / "drafter.safetensors")
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config))
    write_status(run, "finished")


def write_evaluation(
    run: PlannedRun, tokens: Sequence[int] = (12, 9, 8), rounds: Sequence[int] = (6, 6, 4), *, commit: str = "abc"
) -> None:
    """Write what an evaluation of three prompts in two domains leaves."""
    names = [("p0", "chat"), ("p1", "chat"), ("p2", "code")]
    prompts = [
        {"id": i, "domain": d, "tokens": t, "rounds": r} for (i, d), t, r in zip(names, tokens, rounds, strict=True)
    ]
    whole = {"positions": [{"slot": 1, "judged": 10, "accepted": 5}, {"slot": 2, "judged": 5, "accepted": 1}]}
    scores = {
        "settings": run.config["evaluate"],
        "acceptance": {"chat": whole, "code": whole, "all": whole},
        "prompts": prompts,
        "draft": {"milliseconds": {}, "blocks": 7, "per_prompt": [4.0, 6.0, 5.0]},
        "speed": [
            {"name": "plain", "per_prompt": [10.0, 10.0, 10.0]},
            {"name": "speculative", "per_prompt": [12.0, 14.0, 13.0]},
        ],
    }
    name = (run.folder / "checkpoints" / "latest").read_text().strip()
    drafter = str(run.folder / "checkpoints" / name)
    subject = {"drafter": drafter, "data": run.config["data"]["test"], "commit": commit, "machine": "one"}
    record = {"format": "deepspec-evaluation", "version": 1, "subject": subject, "scores": scores}
    (run.folder / "evaluation").mkdir(exist_ok=True)
    (run.folder / "evaluation" / "report.json").write_text(json.dumps(record))


class FakeCommands:
    """Stands in for the two commands; its clock goes on by what each takes."""

    def __init__(self, runs: Sequence[PlannedRun], *, train_s: float = 300.0, evaluate_s: float = 60.0) -> None:
        self.runs = {run.name: run for run in runs}
        self.took = {"train": train_s, "evaluate": evaluate_s}
        self.now = 1000.0
        self.calls: list[tuple[str, str]] = []
        self.words: list[tuple[str, ...]] = []
        self.instead: dict[tuple[str, str], Callable[[PlannedRun, Path], int]] = {}
        """What happens in place of success, by (run, stage)."""

    def clock(self) -> float:
        return self.now

    def __call__(self, command: Sequence[str], output: Path) -> int:
        stage = command[2].removeprefix("deepspec.")
        run = self.runs[next(Path(w.partition("=")[2]).name for w in command if w.partition("=")[0] in PATHS)]
        self.calls.append((run.name, stage))
        self.words.append(tuple(command))
        self.now += self.took[stage]
        if (run.name, stage) in self.instead:
            return self.instead[run.name, stage](run, output)
        if stage == "train":
            write_training(run)
        else:
            write_evaluation(run)
        return 0


PATHS = ("paths.run", "run")


def interrupted(run: PlannedRun, output: Path) -> int:
    raise Interrupted("received SIGTERM")
