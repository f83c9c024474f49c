"""Linears that read INT8 activations, as a W8A8 server computes them, so that what is measured is what is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspec.nn.int8 import quantise_tokens

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor, nn


def round_per_token(x: Tensor) -> Tensor:
    """Round ``x`` [..., i] to symmetric INT8 with one scale a token."""
    values, scale = quantise_tokens(x.flatten(0, -2))
    return (values * scale).to(x.dtype).view_as(x)


def quantise_activations(module: nn.Module, weights: Collection[str]) -> None:
    """Let the linears that own ``weights`` read their input rounded per token from now on."""

    def rounded(_linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_per_token(inputs[0]), *inputs[1:])

    for name in weights:
        module.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(rounded)
