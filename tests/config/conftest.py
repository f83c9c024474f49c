"""A drafter of one's own, outside the package, and commands that print their resolved config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepspec.config.cli import Command
from deepspec.config.resolve import to_plain

ROOT = Path(__file__).parents[2]
PROGRAM = """
import runpy, sys
for module in sys.argv.pop(1).split(","):
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        sys.stderr.write(f"{end.code} {'torch' in sys.modules}\\n")
"""
TOY = '''from dataclasses import dataclass

@dataclass(frozen=True)
class ToyConfig:
    """A drafter that someone else wrote."""

    gamma: int = 3
    width: int = 8

    def problems(self):
        return [f"width={self.width}: must be even"] if self.width % 2 else []

    def build(self, target, target_layer_ids, mask_token_id):
        raise RuntimeError("not needed here")
'''


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    configs: list[dict[str, Any]]


Run = Callable[..., Done]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder with a training file; the toy package beside it can be imported."""
    work, toys = tmp_path / "work", tmp_path / "toys"
    work.mkdir()
    toys.mkdir()
    (work / "train.jsonl").write_text("{}\n")
    (toys / "toypkg.py").write_text(TOY)
    monkeypatch.syspath_prepend(toys)
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command in this process, as its own process would."""
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(*arguments: str, config: str = "config", main: Callable[[Any], None] | None = None) -> Done:
        """Print what was resolved."""
        configs: list[dict[str, Any]] = []

        def note(cfg: Any) -> None:
            configs.append(json.loads(json.dumps(to_plain(cfg))))
            if main is not None:
                main(cfg)

        try:
            code = Command(note, config).run(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        said = capfd.readouterr()
        return Done(code, said.out, said.err, configs)

    return call


def run_process(folder: Path, modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run commands in a process of their own; each says on standard error how it ended and whether torch is loaded."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, modules, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
