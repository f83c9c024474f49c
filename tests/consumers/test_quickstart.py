"""A real drafter, trained briefly on the quickstart's target, is kept by vLLM as often as by our own decoder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspec.export.importers.load import import_drafter
from deepspec.inference.accelerate import accelerate
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.open_target import open_target
from deepspec.inference.proposers import DrafterProposer
from deepspec.log import emit
from tests.bench.packages import PROMPTS, read_prompts
from tests.consumers.consumer import job_for, run_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT_COUNT, NEW_TOKENS = 12, 48
TRAINING = (
    "recipe=quickstart_dflash",
    "drafter.block_layout=fill_in",  # the layout that vLLM runs on a CPU; it has no fitted start
    "drafter.init=target",
    "data.limit=32",
    "train.epochs=1",
)
EXPORT = ("export.layout=zlab_dflash", "export.consumer=[vllm]", "export.verify_prompts=0", "export.verify_samples=2")


def deepspec(command: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"deepspec.{command}", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_vllm_keeps_as_much_as_our_decoder(tmp_path: Path) -> None:
    """At temperature 0, in fp32 on both sides; rounds that the end of a text cuts count alike."""
    run = tmp_path / "run"
    deepspec("prepare", *TRAINING, f"paths.run={run}")
    deepspec("train", *TRAINING, f"paths.run={run}")
    deepspec("export", f"run={run}", *EXPORT, "export.force=true")
    folder = run / "package-zlab_dflash"
    path = json.loads((folder / "config.json").read_text())["deepspec"]["target"]["path"]
    target = open_target(path, torch.device("cpu"), "fp32")
    prompts = [prompt.ids for prompt in read_prompts(PROMPTS, target, PROMPT_COUNT)]
    drafter = import_drafter(folder, target).drafter
    accelerate(target)  # exact; the drafter's weights would be rounded
    drafter.bind(target.head)
    decoder = SpeculativeDecoder(target, DrafterProposer(drafter))
    ours = [decoder.generate(ids, NEW_TOKENS) for ids in prompts]
    job = job_for(folder, path, "float32") | {"max_length": 512, "prompts": prompts, "max_new_tokens": NEW_TOKENS}
    theirs = run_job("vllm", "generate", job, tmp_path / "job.json")
    rounds = sum(len(g.rounds) for g in ours)
    own = 1 + sum(r.accepted for g in ours for r in g.rounds) / rounds
    found = 1 + theirs["accepted"] / theirs["drafts"]
    same = sum(g.tokens == tokens for g, tokens in zip(ours, theirs["tokens"], strict=True))
    emit(f"accepted length: ours {own:.4f} over {rounds} rounds, vLLM {found:.4f} over {theirs['drafts']}")
    emit(f"{same} of {len(prompts)} texts equal")
    assert own > 1.05  # something is kept at all: two drafters that never hit would agree too
    assert found == pytest.approx(own, rel=0.03)
