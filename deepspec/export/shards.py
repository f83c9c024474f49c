"""Write tensors as one safetensors file, or as several with an index when they are large."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from deepspec.inference.package_config import INDEX, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

SHARD_BYTES = 5 * 10**9


def save_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``tensors`` into ``folder``, in shards of at most ``shard_bytes``, or of one tensor.

    ``metadata`` goes into the header of every file.
    """
    header = {"format": "pt", **(metadata or {})}
    shards = split(tensors, shard_bytes)
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata=header)
        return
    names = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata=header)
    index = {
        "metadata": {"total_size": sum(size_of(t) for t in tensors.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """Distribute tensors, in their order, over shards of at most ``shard_bytes``, or of one tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + size_of(tensor) > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size_of(tensor)
    return shards


def size_of(tensor: Tensor) -> int:
    """Return a tensor's bytes."""
    return tensor.numel() * tensor.element_size()
