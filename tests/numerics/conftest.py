"""One start of two ranks serves several fast tests: importing DeepSpeed takes longer than what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numerics.launch import start_ranks

FAST_ENGINES = ("plain", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")
FAST_CASES = ("plain:fp32", "deepspeed-1:bf16", "deepspeed-3:fp32")


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure splits, then run the cases of the resume test up to their death; return the folder."""
    folder = tmp_path_factory.mktemp("two_ranks")
    codes = start_ranks("tests.numerics.fast_worker", str(folder), *FAST_ENGINES, "--", *FAST_CASES, world_size=2)
    assert all(code != 0 for code in codes), "the workers end by SIGKILL"
    return folder
