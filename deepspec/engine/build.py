"""Choose the engine that the configuration names; DeepSpeed is imported only when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspec.engine.plain import PlainEngine

if TYPE_CHECKING:
    from deepspec.config.schema import EngineConfig, OptimConfig
    from deepspec.drafters.base import Drafter
    from deepspec.engine.base import Engine
    from deepspec.engine.distributed import Ranks


def build_engine(drafter: Drafter, *, ranks: Ranks, engine: EngineConfig, optim: OptimConfig) -> Engine:
    """Build the engine around a drafter that has its weights and is bound to its target."""
    if engine.kind == "plain":
        return PlainEngine(drafter, ranks=ranks, engine=engine, optim=optim)
    from deepspec.engine.zero import ZeroEngine

    return ZeroEngine(drafter, ranks=ranks, engine=engine, optim=optim)
