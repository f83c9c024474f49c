"""AdamW whose moments take one byte a number (arXiv 2110.02861), by bitsandbytes, which only this file imports.

``state1`` and ``state2`` (uint8, of the parameter's shape) are indices into the maps ``qmap1`` and ``qmap2`` (fp32,
[256]); ``absmax1`` and ``absmax2`` (fp32, one for every ``BLOCK`` numbers) scale what the maps give. A parameter below
``MIN_SIZE`` has fp32 moments under the same two names, and neither maps nor scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspec.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepspec.config.schema import OptimConfig

BLOCK = 256  # bitsandbytes has no other size for optimisers
MIN_SIZE = 4096  # numbers of a parameter; below it one byte saves nothing that counts. bitsandbytes' own default
MAP_SIZE = 256


def make_adamw8bit(groups: Iterable[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    """Build AdamW with 8-bit moments.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            'optim.name=adamw8bit needs the package bitsandbytes: pip install "deepspec[train]", or set optim=adamw'
        ) from error
    optimizer: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(
        list(groups), lr=config.lr, betas=config.betas, eps=config.eps, min_8bit_size=MIN_SIZE
    )
    return optimizer


def moment_layout(parameter: torch.Tensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and shape of every tensor that the optimiser keeps for ``parameter``."""
    shape, size = tuple(parameter.shape), parameter.numel()
    if size < MIN_SIZE:
        return {"state1": (torch.float32, shape), "state2": (torch.float32, shape)}
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for number in ("1", "2"):
        layout[f"state{number}"] = (torch.uint8, shape)
        layout[f"absmax{number}"] = (torch.float32, (-(-size // BLOCK),))
        layout[f"qmap{number}"] = (torch.float32, (MAP_SIZE,))
    return layout
