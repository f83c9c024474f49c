"""The layouts for serving stacks by name, and who loads each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deepspec.errors import ConfigError
from deepspec.export.layouts.common import LayoutFiles, Source
from deepspec.export.layouts.eagle3 import eagle3
from deepspec.export.layouts.mtp import mtp
from deepspec.export.layouts.speculators import speculators
from deepspec.export.layouts.universal import universal
from deepspec.export.layouts.zlab_dflash import zlab_dflash


@dataclass(frozen=True)
class Layout:
    """One layout: how its files are made, and its consumers in the order of importance."""

    make: Callable[[Source], LayoutFiles]
    consumers: tuple[str, ...]


LAYOUTS: Mapping[str, Layout] = {
    "universal": Layout(universal, ("vllm", "sglang", "speculators", "published_eval")),
    "speculators": Layout(speculators, ("speculators", "vllm")),
    "zlab_dflash": Layout(zlab_dflash, ("vllm", "sglang")),
    "eagle3": Layout(eagle3, ("vllm", "sglang")),
    "mtp": Layout(mtp, ()),
}


def make_files(name: str, source: Source) -> LayoutFiles:
    """Return the files of the layout ``name``.

    Raises:
        ConfigError: there is no such layout, or it cannot hold this drafter.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"export.layout={name} must be native, {', '.join(LAYOUTS)}")
    return LAYOUTS[name].make(source)


def chosen_consumers(name: str, wanted: tuple[str, ...], include_embeddings: bool) -> tuple[str, ...]:
    """Return the consumers that are checked: those wanted, or all that the layout is for.

    The published evaluation code is left out unless the folder holds embedding and head, which it needs.

    Raises:
        ConfigError: the layout is not for one of those wanted.
    """
    known = LAYOUTS[name].consumers
    problems = [
        f"export.consumer={consumer}: export.layout={name} is for {', '.join(known) or 'no server that was verified'}"
        for consumer in wanted
        if consumer not in known
    ]
    if problems:
        raise ConfigError(problems)
    return wanted or tuple(c for c in known if include_embeddings or c != "published_eval")
