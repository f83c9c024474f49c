"""Round matrices to 4 bits so that what the rounding of a column does is made good by the columns after it (GPTQ).

What matters is not how far the rounded matrix Q is from W but how far its outputs are: the sum of |Qx - Wx|^2 over the
inputs x, which depends on them through H = sum of x x^T alone. Columns are rounded from left to right; after each the
ones that are still to come move by the amount that leaves the least such sum, which the upper Cholesky factor of H^-1
holds (Frantar et al., arXiv 2210.17323, section 3.3 and algorithm 1). Each group takes its scale when its turn comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepspec.data.loader import BatchMaker
from deepspec.data.sampler import Entry
from deepspec.errors import DeepSpecError
from deepspec.export.quantise import check_finite, search_groups
from deepspec.log import progress
from deepspec.nn.int4 import pack_int4

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor, nn

    from deepspec.contracts import Batch, Features, Sample
    from deepspec.drafters.base import Drafter

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it, so that it can be inverted; the paper's value."""
ANCHORS_PER_SAMPLE = 32


class FeatureTarget(Protocol):
    """A target that gives the features of a batch: ``targets.Target`` fits."""

    def features(self, batch: Batch, layer_ids: Sequence[int]) -> Features:
        """Return the chosen layers' outputs."""
        ...


class InputProducts:
    """Adds up x x^T of the inputs x of linears while it is open."""

    def __init__(self, drafter: nn.Module, weights: Collection[str]) -> None:
        """Watch the linears whose ``weights`` are named."""
        self._modules = {name: drafter.get_submodule(name.removesuffix(".weight")) for name in weights}
        self._found: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> InputProducts:
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def found(self) -> dict[str, Tensor]:
        """H [i, i] by the name of the weight, on the CPU."""
        return {name: product.cpu() for name, product in self._found.items()}

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:  # noqa: ARG001 - PyTorch's signature
            x = inputs[0].detach().flatten(0, -2).float()
            self._found[name] = self._found.get(name, 0) + x.T @ x

        return add


@torch.no_grad()
def input_products(
    drafter: Drafter, target: FeatureTarget, samples: Sequence[Sample], weights: Collection[str]
) -> dict[str, Tensor]:
    """Return H [i, i] of the linears whose ``weights`` are named, over evenly drawn blocks of ``samples``.

    Raises:
        DeepSpecError: a weight of the drafter is not finite, which would make every input behind it so.
    """
    for name, value in drafter.state_dict().items():
        check_finite(name, value)
    make = BatchMaker(samples, seed=0, anchors_per_sample=ANCHORS_PER_SAMPLE)
    drafter.eval()
    with InputProducts(drafter, weights) as products:
        for index in progress(range(len(samples)), len(samples), "inputs of the 4-bit matrices"):
            batch = make([(Entry(index, 0),)]).to(drafter.head.weight.device)
            if bool(batch.anchor_mask.any()):
                drafter(batch, target.features(batch, drafter.conventions.target_layer_ids))
    return products.found


def round_compensated(name: str, weight: Tensor, products: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return ``packed`` [o, i/2] uint8 and ``scale`` [o, i/group] fp16 of ``weight`` [o, i].

    Args:
        name: The tensor's, for messages.
        weight: fp32 [o, i].
        products: H [i, i] of its inputs.
        group: Columns that share a scale.

    Raises:
        DeepSpecError: fp16 cannot hold a scale, or an input was not finite.
    """
    factor = _factor(name, products)
    rest = weight.double().clone()
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = []
    for start in range(0, weight.shape[1], group):
        stop = start + group
        scale = search_groups(name, rest[:, None, start:stop].float())[1].squeeze(1).double()  # [o, 1]
        errors = torch.empty(len(weight), group, dtype=torch.float64)
        for column in range(start, stop):
            rounded = (rest[:, column : column + 1] / scale).round().clamp(-8, 7)
            error = (rest[:, column : column + 1] - rounded * scale) / factor[column, column]
            rest[:, column:stop] -= error * factor[column, column:stop]
            values[:, column] = rounded.squeeze(1).to(torch.int8)
            errors[:, column - start] = error.squeeze(1)
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
        scales.append(scale)
    return pack_int4(values), torch.cat(scales, dim=1).half()


def _factor(name: str, products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of damped ``products`` [i, i], in float64."""
    wide = products.double()
    if not bool(torch.isfinite(wide).all()):
        raise DeepSpecError(f"an input of {name} is not finite on the conversations of data.validation")
    floor = DAMPING * float(wide.diagonal().mean()) or 1.0
    damped = wide + floor * torch.eye(len(wide), dtype=torch.float64)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def rounded_beforehand(
    weights: Mapping[str, Tensor], products: Mapping[str, Tensor], group: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return values and scales of every matrix whose inputs are known."""
    return {name: round_compensated(name, weights[name].float(), products[name], group) for name in products}
