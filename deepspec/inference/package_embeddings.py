"""Copies of the target's embedding and head in a package, for software that does not take them from the target.

DeepSpec's own decoder never uses them; it compares them with the target's, so that a package is not two things at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.errors import PackageError
from deepspec.inference.package_config import CONFIG, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from deepspec.drafters.files import TensorKind
    from deepspec.inference.package_config import PackageConfig
    from deepspec.nn.head import FrozenHead

EMBEDDING, HEAD, HEAD_BIAS = "embed_tokens.weight", "lm_head.weight", "lm_head.bias"
"""Names of the copies of the target's embedding and head, as published packages have them."""
ROWS = 4096  # compared at a time
HALF_STEP = 0.501  # half a step of rounding, and a little for the rounding of the comparison itself
SMALLEST = 2.0**-24  # distance of the smallest fp16 numbers, where rounding is no longer relative


def check_embeddings(config: PackageConfig, copies: Mapping[str, Tensor], head: FrozenHead) -> None:
    """Compare the stored copies of embedding and head with the target's own."""
    if config.stored_embeddings is None:
        return
    if config.stored_embeddings.tied != head.tied:
        raise PackageError(
            f"{CONFIG}: stored_embeddings.tied={config.stored_embeddings.tied}, but this target's embedding and head "
            f"are {'one tensor' if head.tied else 'two tensors'}"
        )
    own = {EMBEDDING: head.embedding, HEAD: head.weight, HEAD_BIAS: head.bias}
    for name, copy in copies.items():
        values = own[name]
        row = _different_row(copy, values) if values is not None else 0
        if row is not None:
            raise PackageError(f"{WEIGHTS}: tensor {name}: row {row} is not the target's, nor a rounding of it")


def _different_row(copy: Tensor, own: Tensor) -> int | None:
    """Return the first row that differs by more than storing and loading in their types explain; None without one."""
    eps = torch.finfo(copy.dtype).eps + torch.finfo(own.dtype).eps
    for first in range(0, len(copy), ROWS):
        ours = own[first : first + ROWS].to("cpu", torch.float32)
        off = (copy[first : first + ROWS].float() - ours).abs()
        rows = (off > HALF_STEP * eps * ours.abs() + SMALLEST).reshape(len(ours), -1).any(dim=1).nonzero()
        if len(rows):
            return first + int(rows[0])
    return None


def embedding_tensors(config: PackageConfig) -> dict[str, TensorKind]:
    """Return shape and type of the copies of the target's embedding and head that the package must hold."""
    stored, shape = config.stored_embeddings, (config.vocab_size, config.hidden_size)
    if stored is None:
        return {}
    wanted: dict[str, TensorKind] = {EMBEDDING: (shape, config.dtype)}
    if not stored.tied:
        wanted[HEAD] = (shape, config.dtype)
    if stored.head_bias:
        wanted[HEAD_BIAS] = (shape[:1], config.dtype)
    return wanted
