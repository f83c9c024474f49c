"""Whether the weights that come back from a package are those that went in, but for the rounding of their format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.inference.profiles import INT4, SCALE
from deepspec.nn.int4 import MAX_INT4
from deepspec.nn.int8 import MAX_INT8

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from deepspec.inference.package_config import PackageConfig
    from deepspec.inference.profiles import QuantisedGroup

FP16_STEP = 2.0**-24
"""Distance of the smallest fp16 numbers, where rounding is no longer relative."""
HALF = 0.501
"""Half a step, and a little for the rounding of the check itself."""


def rounding_problems(
    weights: Mapping[str, Tensor], restored: Mapping[str, Tensor], config: PackageConfig
) -> Iterator[str]:
    """List every tensor that a package gives back further from the trained weights than rounding explains.

    Args:
        weights: The trained fp32 weights.
        restored: The state of the loaded drafter; INT8 tensors in it are multiplied out.
        config: The package's.
    """
    for name, trained in weights.items():
        if not trained.is_floating_point():
            if not restored[name].equal(trained):
                yield f"tensor {name} comes back changed from the package"
        elif not _close(trained, _floats(name, restored, config), name, config):
            yield f"tensor {name} comes back from the package further off than rounding to {config.profile} explains"


def _floats(name: str, restored: Mapping[str, Tensor], config: PackageConfig) -> Tensor:
    partner = f"{name}{SCALE}"
    return config.groups[name].weight(restored[name], restored[partner]) if partner in restored else restored[name]


def _close(trained: Tensor, restored: Tensor, name: str, config: PackageConfig) -> bool:
    off = (restored.float() - trained.float()).abs()
    group = config.groups.get(name)
    if group is not None and group.scheme == INT4:
        return _groups_close(off, trained, group)
    size = trained.float().abs()
    eps = torch.finfo(getattr(torch, config.dtype_of(name))).eps
    if group is None:
        return bool((off <= HALF * (eps * size + FP16_STEP)).all())  # NaN is not close
    columns = group.group or trained.shape[1]
    step = size.unflatten(1, (-1, columns)).amax(-1, keepdim=True) / MAX_INT8  # [o, i/g, 1]
    return bool((off.unflatten(1, (-1, columns)) <= HALF * step).all())


def _groups_close(off: Tensor, trained: Tensor, group: QuantisedGroup) -> bool:
    """Compare the errors ``off`` [o, i] row by row with steps of rounding to nearest without clipping.

    Single values may be off by more than half a step: the scale of a group may clip its largest where that lowers the
    sum of squares, and compensation moves errors from column to column. The root mean square of a row stays below a
    step; it is 0.3 steps without compensation, at most 0.45 with it on the quickstart's drafter.
    """
    columns = group.group or trained.shape[1]
    step = trained.float().abs().unflatten(1, (-1, columns)).amax(-1) / MAX_INT4  # [o, i/g]
    error, limit = (x.square().mean(-1).sqrt() for x in (off, step))
    return bool((error <= limit + MAX_INT4 * FP16_STEP).all())
