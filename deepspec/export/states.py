"""Watch how large a drafter's states become, so that an overflow in fp16 is found before it is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn


class StateWatch:
    """Keeps the largest absolute value that goes into and comes out of every module while it is open."""

    def __init__(self, module: nn.Module) -> None:
        self.largest: dict[str, float] = {}
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

    def overflows(self, dtype: torch.dtype) -> list[str]:
        """Return a line for every state that ``dtype`` cannot hold."""
        limit = torch.finfo(dtype).max
        return [
            f"{name} reaches {value:.6g}, the largest {str(dtype).removeprefix('torch.')} is {limit:.6g}: "
            "export.profile=bf16 can hold it"
            for name, value in self.largest.items()
            if not value <= limit
        ]

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - PyTorch's signature
            for key, values in ((f"the input of {name}", inputs), (f"the output of {name}", (output,))):
                for value in values:
                    if isinstance(value, torch.Tensor) and value.numel():
                        self.largest[key] = max(self.largest.get(key, 0.0), float(value.detach().abs().max()))

        return keep
