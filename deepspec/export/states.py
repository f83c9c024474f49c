"""Watch how large a drafter's states become, so that an overflow in fp16 is found before it is served."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from torch import nn


class StateWatch:
    """Keeps the largest absolute value that goes into and comes out of every module while it is open."""

    def __init__(self, module: nn.Module) -> None:
        self._largest: dict[tuple[str, str], float] = {}  # module, "input" or "output"
        self._module = module
        self._hooks: list[Any] = []

    def __enter__(self) -> StateWatch:
        for name, module in self._module.named_modules():
            if name and not list(module.children()):
                self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def largest(self) -> dict[str, float]:
        """The largest value of each state, by its name in words; nan where one was not a number."""
        return {f"the {side} of {name}": value for (name, side), value in self._largest.items()}

    def wide(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the modules with finite states that ``dtype`` cannot hold."""
        limit = torch.finfo(dtype).max
        return tuple(dict.fromkeys(name for (name, _), value in self._largest.items() if limit < value < math.inf))

    def overflows(self, dtype: torch.dtype, allowed: Collection[str] = ()) -> list[str]:
        """Return a line for every state that ``dtype`` cannot hold, but for those of the modules ``allowed``."""
        limit, short = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
        return [
            f"the {side} of {name} reaches {value:.6g}, the largest {short} is {limit:.6g}: "
            "export.profile=bf16 can hold it, export.overflow=bf16 keeps the drafter out of fp16"
            for (name, side), value in self._largest.items()
            if not value <= limit and not (name in allowed and value < math.inf)
        ]

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - PyTorch's signature
            for side, values in (("input", inputs), ("output", (output,))):
                for value in values:
                    if isinstance(value, torch.Tensor) and value.numel():
                        self._note((name, side), float(value.detach().abs().max()))

        return keep

    def _note(self, key: tuple[str, str], value: float) -> None:
        before = self._largest.get(key, 0.0)
        self._largest[key] = before if value <= before or math.isnan(before) else value  # nan stays
