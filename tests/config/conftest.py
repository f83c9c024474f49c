"""A drafter of one's own, outside the package, and a program that prints its resolved config."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = '''"""Print what was resolved."""
import sys
from deepspec.config.cli import hydra_command
from deepspec.config.resolve import to_plain

@hydra_command("{config}")
def main(cfg):
    import json
    print(json.dumps(to_plain(cfg)))
    {body}
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported")

if __name__ == "__main__":
    main()
'''
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

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a command in an empty folder and captures what it says."""

    def call(
        *arguments: str, config: str = "config", body: str = "pass", **env: str
    ) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(config=config, body=body))
        (tmp_path / "toypkg.py").write_text(TOY)
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", **env}
        command = [sys.executable, str(program), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return call
