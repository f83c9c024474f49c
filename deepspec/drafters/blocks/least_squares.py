"""Ridge regression over rows that come in parts, and what the fit of a drafter's start needs around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = 1e-3  # of what the first direction carries


class LeastSquares:
    """A ridge regression whose rows come in parts."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self._gram = torch.zeros(inputs, inputs, device=device)
        self._cross = torch.zeros(inputs, outputs, device=device)
        self._weight = torch.zeros((), device=device)

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Take rows ``x`` [R, inputs] and ``y`` [R, outputs] with weights [R]."""
        weighted = x * weight[:, None]
        self._gram.addmm_(weighted.t(), x)
        self._cross.addmm_(weighted.t(), y)
        self._weight += weight.sum()

    def add_group(self, x: Tensor, y: Tensor) -> None:
        """Take rows ``x`` [R, inputs] that weigh 1 together; ``y`` is [R, outputs], or [outputs] for all of them."""
        if len(x):
            self.add(x.float(), y.expand(len(x), -1), torch.full((len(x),), 1.0 / len(x), device=x.device))

    @property
    def moment(self) -> Tensor:
        """Mean of x x^T [inputs, inputs]."""
        return self._gram / self._weight.clamp(min=1e-30)

    def solve(self, ridge: float) -> Tensor:
        """Return A [inputs, outputs] with least |x A - y|^2 + ridge |A|^2, where every input has a mean square of 1.

        In double precision: a few channels of a target's states are a thousand times the others.
        """
        gram, cross = self._gram.double(), self._cross.double()
        squares = gram.diagonal()
        scale = squares.clamp(min=1e-12 * float(squares.max()) + 1e-30).sqrt()  # [inputs]
        gram = gram / scale / scale[:, None]
        gram.diagonal().add_(ridge)
        return (torch.linalg.solve(gram, cross / scale[:, None]) / scale[:, None]).to(self._cross.dtype)


@dataclass(frozen=True)
class Root:
    """The roots of a symmetric positive form F."""

    half: Tensor  # F^(1/2)
    inverse_half: Tensor  # F^(-1/2)


def root(form: Tensor, floor: float = 1e-6) -> Root:
    """Return the roots of a symmetric positive form, its eigenvalues lifted to at least ``floor`` of their mean."""
    values, vectors = torch.linalg.eigh(form.double())
    values = values.clamp(min=floor * float(values.mean()) + 1e-30)
    half, inverse = ((vectors * values.pow(power)) @ vectors.t() for power in (0.5, -0.5))
    return Root(half.to(form.dtype), inverse.to(form.dtype))


def quiet_directions(moment: Tensor, count: int) -> Tensor:
    """Return the ``count`` orthonormal directions [D, count] in which rows of this moment [D, D] say least."""
    return torch.linalg.eigh(moment.double()).eigenvectors[:, :count].to(moment.dtype)


def leading_inputs(solution: Tensor, moment: Tensor, rank: int, floor: float = 1e-6) -> Tensor:
    """Return the ``rank`` input directions [D, rank] of unit variance that carry most of x ``solution``.

    Directions with less than ``floor`` of the mean variance are not brought up to it, and those that carry next to
    nothing stay zero: what they meet outside of these rows could be anything.
    """
    roots = root(moment, floor)
    left, size, _ = torch.linalg.svd(roots.half @ solution, full_matrices=False)
    left = left * (size > NOTHING * size[0])
    return widen(roots.inverse_half @ left[:, :rank], rank)


def widen(columns: Tensor, width: int) -> Tensor:
    """Fill up with columns of zeros."""
    return functional.pad(columns, (0, width - columns.shape[1]))


def separate(positive: Tensor, negative: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return w [D] with w x near 1 for rows of ``positive`` and near -1 for the others; both groups weigh the same."""
    fit = LeastSquares(positive.shape[1], 1, positive.device)
    fit.add_group(positive, torch.ones(1, device=positive.device))
    fit.add_group(negative, -torch.ones(1, device=positive.device))
    return fit.solve(ridge)[:, 0]
