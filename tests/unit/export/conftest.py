"""One thread: the tensors of these tests are tiny."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(seeded: None) -> None:
    torch.set_num_threads(1)
