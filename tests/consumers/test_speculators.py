"""speculators loads what we write for it, every tensor bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from tests.consumers.consumer import Case, run_job, same, saved_target, weights_in

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.slow

CASES = [
    Case("dspark", "speculators"),
    Case("dspark", "speculators", over={"draft_vocab_size": 40}),
    Case("dspark", "speculators", over={"markov_head": "gated"}),
    Case("dspark", "speculators", over={"markov_head": "rnn"}),
    Case("dspark", "speculators", over={"confidence_head": False}),
    Case("dflash", "speculators"),
    Case("fill_in", "speculators"),
    Case("fill_in", "speculators", over={"sliding_window": 8}),
    Case("dspark", "universal"),
    Case("dspark", "universal", embeddings=True),
    Case("dspark", "universal", over={"draft_vocab_size": 40}),
    Case("dflash", "universal"),
]
FROM_THE_TARGET = {  # what the library takes from the verifier
    "embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
    "verifier_lm_head.weight": "lm_head.weight",
    "verifier_norm.weight": "model.norm.weight",
}


@dataclass(frozen=True)
class Loaded:
    """What a case became: its folder's tensors, the library's, and its class."""

    ours: dict[str, Tensor]
    theirs: dict[str, Tensor]
    name: str


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Loaded], dict[str, Tensor]]:
    """Load every case in one process; the target's tensors beside it."""
    root = tmp_path_factory.mktemp("speculators")
    target, verifier = saved_target(root / "target")
    folders = [case.write(root / f"drafter-{n}", target, verifier) for n, case in enumerate(CASES)]
    jobs = [{"folder": str(f), "out": str(root / f"{f.name}.safetensors")} for f in folders]
    found = run_job("speculators", "load", jobs, root / "jobs.json")
    made = [
        Loaded(weights_in(f), load_file(j["out"]), a["class"]) for f, j, a in zip(folders, jobs, found, strict=True)
    ]
    return dict(zip(map(str, CASES), made, strict=True)), weights_in(root / "target")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tensor_comes_back(case: Case, loaded: tuple[dict[str, Loaded], dict[str, Tensor]]) -> None:
    found, target = loaded[0][str(case)], loaded[1]
    ours, theirs = found.ours, found.theirs
    assert found.name == ("DFlashDraftModel" if case.kind == "fill_in" else "DSparkDraftModel")
    assert [name for name in ours if name not in theirs] == []
    assert [name for name in ours if not same(ours[name], theirs[name])] == []
    for name in sorted(theirs.keys() - ours.keys()):
        expected = target[FROM_THE_TARGET[name]]
        if "lm_head" in name and "t2d" in ours:  # the verifier's rows of the draft vocabulary
            expected = expected[ours["t2d"]]
        assert theirs[name].float().equal(expected.to(theirs[name].dtype).float()), name
