"""The command compare with a tiny target: two variants with two seeds, interrupted once, failing once, finished."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands.tiny_run import overrides, write_conversations
from tests.numerics.launch import ROOT, environment

SHORT = [
    "train.max_steps=3",
    "evaluate.limit=2",
    "evaluate.max_new_tokens=8",
    "evaluate.timing_prompts=2",
    "evaluate.timing_new_tokens=8",
    "evaluate.confidence_threshold=null",
    "evaluate.check_lossless=false",
]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Write a study and return the command that runs it."""
    words = [w for w in overrides(tmp_path, samples=8) if not w.startswith(("recipe=", "paths.run="))]
    shared = [w for w in words if not w.startswith("drafter.markov_rank")]
    test = write_conversations(tmp_path / "test.jsonl", 2)
    study = {
        "name": "tiny",
        "recipe": "quickstart",
        "overrides": [*shared, f"data.test={test}", *SHORT],
        "baseline": "dspark",
        "variants": {
            "dspark": {"seeds": [0, 1], "overrides": ["drafter.markov_rank=8"]},
            "dflash": {"recipe": "quickstart_dflash", "seeds": [0, 1]},
        },
    }
    (tmp_path / "mine" / "study").mkdir(parents=True)
    (tmp_path / "mine" / "study" / "tiny.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    program = [sys.executable, "-m", "deepspec.compare", "--config-dir", str(tmp_path / "mine")]
    return [*program, "study=tiny", f"paths.runs={tmp_path / 'runs'}"]


def call(command: list[str], *extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *extra], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.slow
def test_a_study_from_its_first_call_to_its_table(command: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    first = folder / "dspark-seed0" / "status.json"
    deadline = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "received SIGTERM" in said
    assert json.loads(first.read_text())["status"] in ("interrupted", "finished")

    late = folder / "dflash-seed1" / "checkpoints"
    late.parent.mkdir(parents=True)
    late.write_text("a file where a folder has to be")
    done = call(command)
    assert done.returncode == 1, done.stderr
    assert "1 of 4 runs failed" in done.stderr and "dflash-seed1, train: " in done.stderr
    late.unlink()
    done = call(command)
    assert done.returncode == 0, done.stderr
    assert "dspark-seed0: finished already" in done.stderr

    record: dict[str, Any] = json.loads((folder / "comparison.json").read_text())["comparison"]
    dspark, dflash = record["variants"]
    assert (dspark["name"], sorted(dspark["by_seed"]), record["missing"]) == ("dspark", ["0", "1"], {})
    assert dspark["parameters"] > dflash["parameters"] > 0
    assert dspark["training_minutes"] > 0 and dspark["draft_ms"]["value"] > 0
    assert dflash["gain"]["seed_error"] is not None and dflash["more_than_chance"]
    assert "Accepted length per round, 2 prompts" in (folder / "comparison.md").read_text()
    samples = [yaml.safe_load((run / "config.yaml").read_text()) for run in sorted(folder.glob("*-seed*"))]
    assert [(c["seed"], c["data"]["seed"]) for c in samples] == [(0, 0), (1, 0)] * 2
