"""Tiny drafters of every kind as sources of layouts, and their folders in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.files import tensor_kinds
from deepspec.drafters.mtp.config import MTPConfig
from deepspec.export.conformance.folder import Folder
from deepspec.export.layouts.common import LayoutFiles, Numbers, Source
from deepspec.export.layouts.registry import make_files
from deepspec.nn.head import FrozenHead
from tests.unit.drafters.small import VOCAB, WIDTH, target_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepspec.contracts import TargetInfo
    from deepspec.drafters.base import DrafterConfig

TAPS = (1, 2, 4)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[..., DrafterConfig]] = {
    "dspark": lambda **over: DSparkConfig(**{"num_layers": 2, "gamma": 4, "markov_rank": 8, **over}),
    "dflash": lambda **over: DFlashConfig(**{"num_layers": 2, "gamma": 4, **over}),
    "fill_in": lambda **over: DFlashConfig(**{"num_layers": 2, "gamma": 4, "block_layout": "fill_in", **over}),
    "eagle3": lambda **over: Eagle3Config(**{"ttt_length": 4, **over}),
    "mtp": lambda **over: MTPConfig(**over),
}
LAYOUT_OF = {
    "dspark": "universal", "dflash": "universal", "fill_in": "zlab_dflash", "eagle3": "eagle3", "mtp": "mtp"
}  # fmt: skip


def info(**over: Any) -> TargetInfo:
    """Return a target whose widths all differ, so that a transposed matrix shows."""
    return target_info(**{"name": "org/tiny", "eos_token_ids": (2,), "fingerprint": "f00", **over})


def source(
    kind: str = "dspark",
    *,
    taps: tuple[int, ...] = TAPS,
    target: TargetInfo | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    quantisation: Any = "none",
    include_embeddings: bool = False,
    temperature: float = 1.0,
    **over: Any,
) -> Source:
    """Return a random drafter of ``kind``, bound to a random head; ``over`` goes to its configuration."""
    torch.manual_seed(7)
    target, config = target or info(), CONFIGS[kind](**over)
    drafter = config.build(target, taps, VOCAB - 1)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.2)
    embedding = torch.randn(target.vocab_size, WIDTH)
    weight = embedding if tied else torch.randn(target.vocab_size, WIDTH)
    drafter.bind(FrozenHead.from_tensors(target, embedding, weight))
    if drafter.d2t is not None:
        drafter.set_vocabulary(torch.randperm(target.vocab_size)[: len(drafter.d2t)].sort().values)
    return Source(
        drafter.eval(),
        config,
        target,
        Numbers(dtype, quantisation),
        include_embeddings=include_embeddings,
        verifier="org/tiny",
        temperature=temperature,
    )


def files(kind: str = "dspark", layout: str | None = None, **over: Any) -> LayoutFiles:
    """Return the files of a drafter's layout."""
    return make_files(layout or LAYOUT_OF[kind], source(kind, **over))


def folder(made: LayoutFiles, target: TargetInfo | None = None, served_dtype: str | None = None) -> Folder:
    """Return the files as the tables look at a folder; the config has been through JSON."""
    return Folder(json.loads(json.dumps(made.config)), tensor_kinds(made.tensors), target, served_dtype)
