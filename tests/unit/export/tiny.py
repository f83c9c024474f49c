"""A tiny target, drafters and packages for the tests of export and of loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from deepspec.contracts import Sample
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.export.package import native_package, staged, write_checksums, write_package
from deepspec.export.shards import SHARD_BYTES
from deepspec.inference.assemble import assemble
from deepspec.inference.calibration import Calibration
from deepspec.inference.package_config import CONFIG, HEADER_KEYS, WEIGHTS
from deepspec.inference.package_embeddings import embedding_tensors
from deepspec.inference.selfcheck import SelfCheck, make_selfcheck
from tests.helpers import tiny_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from deepspec.drafters.base import Drafter, DrafterConfig
    from deepspec.export.quantise import Formats
    from deepspec.inference.profiles import Profile
    from deepspec.targets.target import Target

LAYER_IDS = (1, 2, 4)
MASK_ID = 96
SIZES = {"intermediate_size": 48, "head_dim": 16, "max_position_embeddings": 256}


def make_target(seed: int = 0, **over: Any) -> Target:
    """Return a random Llama of six layers with 97 tokens; ``over`` goes to its config."""
    return tiny_target("llama", seed=seed, **{**SIZES, "tie_word_embeddings": True, **over})


def make_drafter(
    target: Target, seed: int = 1, config: DrafterConfig | None = None, **over: Any
) -> tuple[Drafter, DrafterConfig]:
    """Return a drafter with weights large enough for its context to matter, bound to ``target``."""
    torch.manual_seed(seed)
    config = config or DSparkConfig(**{"num_layers": 2, "gamma": 4, "markov_rank": 8, **over})
    drafter = config.build(target.info, LAYER_IDS, MASK_ID)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(std=0.15)
    if drafter.d2t is not None:
        drafter.set_vocabulary(torch.randperm(target.info.vocab_size)[: len(drafter.d2t)].sort().values)
    drafter.bind(target.head)
    return drafter.eval(), config


def make_package(
    folder: Path,
    profile: Profile,
    target: Target | None = None,
    *,
    formats: Formats | None = None,
    include_embeddings: bool = False,
    whole: bool = False,
    shard_bytes: int = SHARD_BYTES,
    **over: Any,
) -> Path:
    """Write a package and return its folder; a ``whole`` one has a calibration and a self-check."""
    target = target or make_target()
    drafter, config = make_drafter(target, **over)
    made, tensors = native_package(
        drafter, config, target.info, profile, formats=formats, include_embeddings=include_embeddings
    )
    calibration, selfcheck = None, None
    if whole:
        own = {name: tensor for name, tensor in tensors.items() if name not in embedding_tensors(made)}
        selfcheck = tiny_selfcheck(assemble(made, config, own, target.head), target)
        calibration = tiny_calibration(made.gamma)
    with staged(folder) as temporary:
        write_package(temporary, made, tensors, calibration, selfcheck, shard_bytes=shard_bytes)
    return folder


def tiny_calibration(gamma: int) -> Calibration:
    """Return a calibration whose numbers differ from slot to slot."""
    rising = tuple(0.1 + 0.01 * j for j in range(gamma))
    counts = tuple(90 - 10 * j for j in range(gamma))
    return Calibration(
        version=1,
        temperatures=tuple(0.5 + 0.25 * j for j in range(gamma)),
        rounds=counts,
        kept=tuple(count // 2 for count in counts),
        ece_before=rising,
        ece_after=rising,
        brier_before=rising,
        brier_after=rising,
        auc_before=(*rising[:-1], None),
        auc_after=(*rising[:-1], None),
        split="validation",
        prompts=7,
        decoding_temperature=0.0,
        max_new_tokens=16,
    )


def tiny_selfcheck(drafter: Drafter, target: Target) -> SelfCheck:
    """Return two stored prompts with what ``drafter`` proposes."""
    return make_selfcheck(drafter, target, [list(range(5, 15)), [7, 7, 30]])


def make_samples(count: int = 3, length: int = 40) -> list[Sample]:
    """Return random samples, supervised from their tenth token on."""
    ids = torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(3)).tolist()
    return [Sample(str(n), tuple(row), tuple(t >= 10 for t in range(length))) for n, row in enumerate(ids)]


class ForcedLogits:
    """A token sampler that goes on with given tokens and keeps the logits."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.logits = iter(tokens), list[torch.Tensor]()

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self.logits.append(logits.float())
        return torch.tensor(next(self.tokens)), self.logits[-1].softmax(-1)


def edit_config(package: Path, edit: Callable[[dict[str, Any]], None], *, header_too: bool = False) -> None:
    """Change ``config.json`` (and its copy in the weights' header), and renew the checksums."""
    config = json.loads((package / CONFIG).read_text())
    edit(config)
    (package / CONFIG).write_text(json.dumps(config))
    if header_too:
        edit_tensors(package, dict.copy, header=config)
    write_checksums(package)


def edit_tensors(
    package: Path, edit: Callable[[dict[str, Tensor]], object], *, header: dict[str, Any] | None = None
) -> None:
    """Change the tensors, keep or set the header's config, and renew the checksums."""
    with safe_open(package / WEIGHTS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    edit(tensors)
    if header is not None:
        metadata[HEADER_KEYS[CONFIG]] = json.dumps(header)
    save_file({n: t.contiguous() for n, t in tensors.items()}, package / WEIGHTS, metadata=metadata)
    write_checksums(package)


def copy_package(package: Path, to: Path) -> Path:
    """Return a copy that may be damaged."""
    shutil.copytree(package, to)
    return to
