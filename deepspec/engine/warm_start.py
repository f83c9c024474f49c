"""Start from the weights of another drafter: a run, a checkpoint or an exported package.

Tensors are matched by name and shape, so that a DSpark can take over a DFlash's backbone, and any drafter an exported
package of its own kind. What the source lacks keeps the weights that ``drafter.init`` gave it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from deepspec.checkpoint.store import newest_drafter
from deepspec.errors import ConfigError
from deepspec.inference.checkpoint import load_checkpoint
from deepspec.inference.package import is_package, load_package

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deepspec.drafters.base import Drafter
    from deepspec.inference.package_checks import BindableTarget

FUSION = "fc.weight"
"""Reads the captured layers side by side: it means nothing for others."""


def warm_start(drafter: Drafter, source: str, target: BindableTarget) -> list[str]:
    """Give ``drafter`` what fits of the drafter in ``source``; return lines that say what came from where.

    Raises:
        ConfigError: nothing fits, or the drafter in ``source`` reads other layers of the target.
        PackageError: ``source`` holds no whole drafter of this target.
    """
    folder = Path(source)
    if is_package(folder):
        other = load_package(folder, target, dtype=torch.float32, multiplied_out=True)
    else:
        folder = newest_drafter(folder)
        other = load_checkpoint(folder, target)
    own, theirs = drafter.state_dict(), other.state_dict()
    taken = {name: theirs[name] for name in own if name in theirs and theirs[name].shape == own[name].shape}
    if not taken:
        raise ConfigError(
            f"train.warm_start={source}: no tensor of that {type(other).__name__} has the name and shape of one of "
            f"this {type(drafter).__name__}; give another source, or null"
        )
    if FUSION in taken and other.taps != drafter.taps:
        raise ConfigError(
            f"train.warm_start={source} reads layers {list(other.taps)} of the target, this run {list(drafter.taps)}: "
            f"set target.target_layer_ids={str(list(other.taps)).replace(' ', '')}"
        )
    drafter.load_state_dict({**own, **taken})
    return [
        f"from the {type(other).__name__} in {folder}: {_parts(taken)}",
        *_line("as drafter.init says, for the source has no such tensor", (n for n in own if n not in theirs)),
        *_line("as drafter.init says, for their shape is another", (n for n in own if n in theirs and n not in taken)),
        *_line("left out, for this drafter has no such tensor", (n for n in theirs if n not in own)),
    ]


def _line(what: str, names: Iterable[str]) -> list[str]:
    found = list(names)
    return [f"{what}: {_parts(found)}"] if found else []


def _parts(names: Iterable[str]) -> str:
    """Name the modules that tensors belong to, a layer as one."""
    depth = {"layers": 2}
    parts = (name.split(".") for name in names)
    return ", ".join(dict.fromkeys(".".join(part[: depth.get(part[0], 1)]) for part in parts))
