"""Folders for other software to load, and that software in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.export.layouts.common import Numbers, Source
from deepspec.export.layouts.registry import make_files
from deepspec.export.layouts.serving import command_for
from deepspec.export.layouts.write import write_files
from tests.unit.export.layouts.cases import CONFIGS
from tests.unit.export.tiny import make_drafter, make_target

if TYPE_CHECKING:
    from torch import Tensor

    from deepspec.targets.target import Target

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("CONSUMERS", HERE.parents[1] / ".consumers"))
HEAD_DIM = 32  # vLLM has no attention on a CPU for 16


def python_of(consumer: str) -> str:
    """Return the interpreter of a consumer's environment; without one its tests fail."""
    path = ENVIRONMENTS / consumer / "bin" / "python"
    if not path.exists():
        pytest.fail(f"{path} is missing: launch/consumers.sh {consumer} makes it (some minutes, some gigabytes)")
    return str(path)


def run_job(consumer: str, what: str, job: Any, path: Path, seconds: int = 600) -> Any:
    """Hand ``job`` over to ``in_CONSUMER.py`` as a file, and return the answer."""
    path.write_text(json.dumps(job))
    command = [python_of(consumer), str(HERE / f"in_{consumer}.py"), what, str(path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(path.with_suffix(".answer.json").read_text())


@dataclass(frozen=True)
class Case:
    """One folder: a drafter, a layout, and how its linears are stored."""

    kind: str
    layout: str
    quantisation: Any = "none"
    over: dict[str, Any] = field(default_factory=dict)  # of the drafter's configuration
    embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        """Return a name for the test."""
        more = [f"{k}={v}" for k, v in self.over.items()] + ["embeddings"] * self.embeddings
        return "-".join([self.kind, self.layout, self.quantisation, str(self.dtype).removeprefix("torch."), *more])

    def write(self, folder: Path, target: Target, verifier: str) -> Path:
        """Write the folder and return it."""
        drafter, config = make_drafter(target, config=CONFIGS[self.kind](**self.over))
        numbers = Numbers(self.dtype, self.quantisation)
        source = Source(drafter, config, target.info, numbers, include_embeddings=self.embeddings, verifier=verifier)
        folder.mkdir(parents=True)
        write_files(folder, make_files(self.layout, source))
        return folder


def job_for(folder: Path, target: str, dtype: str, out: Path | None = None) -> dict[str, Any]:
    """Return what vLLM is asked to load, with the words that our own serving script would pass."""
    words = command_for("vllm", folder, target, []).words
    said = json.loads(words[words.index("--speculative-config") + 1])
    job = {"folder": str(folder), "target": target, "dtype": dtype, "max_length": 128, "out": str(out)}
    return job | {"method": said["method"], "tokens": said["num_speculative_tokens"]}


def saved_target(folder: Path) -> tuple[Target, str]:
    """Return a tiny target, and the folder in which it lies in the type that it is served in."""
    target = make_target(head_dim=HEAD_DIM, tie_word_embeddings=False)
    for parameter in target.model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    target.model.save_pretrained(folder)
    return target, str(folder)


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder."""
    return load_file(folder / "model.safetensors")


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
