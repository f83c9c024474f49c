"""The classes and the engine of vLLM take what we write for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.export.importers.load import import_drafter
from deepspec.export.layouts.common import Numbers, Source
from deepspec.export.layouts.registry import make_files
from deepspec.export.layouts.write import write_files
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer, PlainProposer
from tests.consumers.consumer import Case, job_for, run_job, same, saved_target, weights_in
from tests.overfit import overfit
from tests.unit.export.tiny import LAYER_IDS, MASK_ID

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from torch import Tensor

    from deepspec.drafters.base import DrafterConfig

pytestmark = pytest.mark.slow

CASES = [
    *[
        Case(kind, layout, quantisation)
        for kind, layout in [
            ("dspark", "universal"),
            ("dflash", "universal"),
            ("dspark", "speculators"),
            ("fill_in", "speculators"),
            ("fill_in", "zlab_dflash"),
            ("eagle3", "eagle3"),
        ]
        for quantisation in ("none", "w8a8", "w8a16")
    ],
    Case("dspark", "universal", dtype=torch.float16),
    Case("dspark", "universal", embeddings=True),
    Case("dspark", "universal", over={"draft_vocab_size": 40}),
    Case("dspark", "universal", over={"confidence_head": False}),
    Case("dspark", "universal", over={"sliding_window": 8}),
    Case("dspark", "speculators", over={"draft_vocab_size": 40}),
    Case("fill_in", "zlab_dflash", over={"draft_vocab_size": 40}),
    Case("fill_in", "zlab_dflash", over={"sliding_window": 8}),
    Case("eagle3", "eagle3", over={"draft_vocab_size": 40}),
]
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
RENAMED = {"midlayer": "model.layers.0", "d2t": "draft_id_to_target_id"}
SHARED = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
"""What a folder may lack: the runner takes the target's, or the mask's row of it."""
OWN = ".self_attn.attn."  # scales of the KV cache, which vLLM sets when everything is loaded


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path, dict[str, Any]]]:
    """Load every case in one process: the folder, vLLM's tensors, and what was found."""
    root = tmp_path_factory.mktemp("vllm")
    target, verifier = saved_target(root / "target")
    folders = {str(case): case.write(root / f"drafter-{n}", target, verifier) for n, case in enumerate(CASES)}
    jobs = [
        job_for(folder, verifier, str(case.dtype).removeprefix("torch."), root / f"{n}.safetensors")
        for n, (case, folder) in enumerate(zip(CASES, folders.values(), strict=True))
    ]
    found = run_job("vllm", "load", jobs, root / "jobs.json")
    outs = [root / f"{n}.safetensors" for n in range(len(CASES))]
    return dict(zip(folders, zip(folders.values(), outs, found, strict=True), strict=True))


def in_vllm(ours: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return our tensors under vLLM's ``names``: those of fused linears are joined by rows."""
    found: dict[str, Tensor] = {}
    for whole, parts in FUSED.items():
        for name in [n for n in ours if f".{parts[0]}." in n and not n.endswith("_shape")]:
            found[name.replace(parts[0], whole)] = torch.cat([ours[name.replace(parts[0], part)] for part in parts])
    members = [f".{part}." for parts in FUSED.values() for part in parts]
    found |= {n: t for n, t in ours.items() if n not in ("t2d",) and not any(part in n for part in members)}
    for old, new in RENAMED.items():
        found = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in found.items()}
    return {f"model.{n}" if f"model.{n}" in names else n: t for n, t in found.items()}


def holds(theirs: Tensor, ours: Tensor) -> bool:
    """Return whether vLLM's tensor is ours: perhaps in a wider type, perhaps with rows of padding behind it."""
    if theirs.dtype == torch.float32:
        ours = ours.float()
    return theirs.shape[1:] == ours.shape[1:] and same(theirs[: len(ours)], ours)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_vllms_class_is_filled_with_our_tensors(
    case: Case, loaded: dict[str, tuple[Path, Path, dict[str, Any]]]
) -> None:
    folder, out, found = loaded[str(case)]
    theirs, stored = load_file(out), weights_in(folder)
    ours = in_vllm(stored, theirs)
    lacking = [name for name in SHARED if name not in stored]
    assert [n for n in found["nan"] if not n.endswith(tuple(lacking)) and OWN not in n] == []
    assert found["taps"] == [layer + 1 for layer in LAYER_IDS]
    assert sorted(ours.keys() - theirs.keys()) == []
    assert [name for name in ours if not holds(theirs[name], ours[name])] == []


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (DFlashConfig(num_layers=2, gamma=5, block_layout="fill_in"), "zlab_dflash"),
        (Eagle3Config(ttt_length=5, ce=1.0), "eagle3"),
    ],
    ids=["zlab_dflash", "eagle3"],
)
def test_a_drafter_known_by_heart_is_accepted_whole_by_vllm(config: DrafterConfig, layout: str, tmp_path: Path) -> None:
    """Layer ids, mask id and positions of a foreign engine are those that the drafter was trained with."""
    target, verifier = saved_target(tmp_path / "target")
    prompt, count = [5, 17, 42, 8, 17, 42, 9, 60, 33, 17, 42], 31
    answer = SpeculativeDecoder(target, PlainProposer()).generate(prompt, count).tokens
    torch.manual_seed(2)
    drafter = config.build(target.info, LAYER_IDS, MASK_ID)
    drafter.bind(target.head)
    gamma = drafter.conventions.gamma
    overfit(target, drafter, [*prompt, *answer], len(prompt), LAYER_IDS, steps=150)
    folder = tmp_path / "drafter"
    folder.mkdir()
    source = Source(drafter, config, target.info, Numbers(torch.bfloat16), verifier=verifier)
    write_files(folder, make_files(layout, source))
    job = job_for(folder, verifier, "float32") | {"prompts": [prompt], "max_new_tokens": count}
    found = run_job("vllm", "generate", job, tmp_path / "job.json")
    assert found["tokens"] == [answer]
    rounds = (count - 1) // (gamma + 1)
    assert (found["drafts"], found["by_place"]) == (rounds, [rounds] * gamma)
    ours = SpeculativeDecoder(target, DrafterProposer(import_drafter(folder, target).drafter)).generate(prompt, count)
    assert [r.accepted for r in ours.rounds] == [gamma] * rounds
