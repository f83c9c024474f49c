"""The acceptance rule of speculative sampling (Leviathan et al. 2023, Chen et al. 2023), on plain tensors.

A draft token x, drawn from q, is kept with probability min(1, p(x) / q(x)); the first one refused is replaced by a
draw from max(p - q, 0), renormalised; when all are kept, one more token comes from the target. The output is then
distributed exactly as the target's own, if q is what x was really drawn from. Greedy is the limit of one-token p and q.

The letter N stands for independent blocks; the decoder calls with N = 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def verify_sampled(
    tokens: Tensor, draft: Tensor, target: Tensor, uniforms: Tensor, draw: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Judge drafted blocks.

    Args:
        tokens: [N, K] int64, the drafted tokens.
        draft: [N, K, V] fp32, the distributions q they were drawn from.
        target: [N, K+1, V] fp32, the target's distributions p at the same slots, and after the last one.
        uniforms: [N, K] fp32 in [0, 1).
        draw: draws one token from each row of [N, V].

    Returns:
        (accepted: [N] int64 in 0 .. K, next: [N] int64, the token after the accepted ones).
    """
    p = target[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # [N, K]
    q = draft.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)  # [N, K]
    # u < p/q without the division; strict, so that a token with p = 0 is refused even when u is 0.
    kept = uniforms * q < p
    accepted = kept.long().cumprod(dim=-1).sum(dim=-1)
    return accepted, draw(_next_distribution(draft, target, accepted))


def _next_distribution(draft: Tensor, target: Tensor, accepted: Tensor) -> Tensor:
    """Return [N, V]: the residual at the first refused slot, or the target's own after a whole block."""
    rows = torch.arange(len(accepted), device=accepted.device)
    p = target[rows, accepted]  # [N, V]
    num_drafted = draft.shape[1]
    if num_drafted == 0:
        return p
    whole = (accepted == num_drafted).unsqueeze(-1)
    q = draft[rows, accepted.clamp(max=num_drafted - 1)].masked_fill(whole, 0.0)
    residual = (p - q).clamp(min=0.0)
    mass = residual.sum(dim=-1, keepdim=True)
    # No mass is left only where p equals q: nothing is refused there but by rounding, and p itself is right.
    return torch.where(mass > 0.0, residual / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def verify_greedy(tokens: Sequence[int], choices: Sequence[int]) -> tuple[int, int]:
    """Judge one block greedily.

    Args:
        tokens: the K drafted tokens.
        choices: the target's K+1 most likely tokens, at the same slots and after the last one.

    Returns:
        (accepted: 0 .. K, next: the target's choice after the accepted tokens).
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]
