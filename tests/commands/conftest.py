"""A run folder as training leaves it, for the commands that start from one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspec.checkpoint.state import Progress, TrainState
from deepspec.checkpoint.store import CheckpointStore
from deepspec.config.cli import Command
from deepspec.config.resolve import save_config
from deepspec.config.schema import RunConfig
from deepspec.targets.load import layer_ids, load_target
from tests.commands.tiny_run import overrides, write_conversations


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Take the program's log handlers away again: they write to this test's streams."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before[0], before[1]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder as training leaves it, with a random drafter."""
    work = tmp_path_factory.mktemp("work")
    test = write_conversations(work / "test.jsonl", 4)
    configs: list[RunConfig] = []
    arguments = [*overrides(work, samples=4), f"data.test={test}", f"hydra.run.dir={work / 'hydra'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program"])
        patch.chdir(work)
        assert Command(configs.append, "config").run(arguments) == 0
    config, run = configs[0], work / "run"
    run.mkdir(exist_ok=True)
    save_config(config, run / "config.yaml")
    info = load_target(config.target).info
    taps = layer_ids(config.target, info.num_layers)
    drafter = config.drafter.build(info, taps, config.target.mask_token_id)
    store = CheckpointStore(
        run / "checkpoints", drafter=drafter, config=config.drafter, info=info, fingerprints={}, keep=1
    )
    store.save(TrainState(parameters=drafter.state_dict()), Progress(step=1))
    return run


@pytest.fixture(autouse=True)
def _one_thread(seeded: None) -> None:
    torch.set_num_threads(1)
