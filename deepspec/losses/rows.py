"""The loss terms of one draft row, written so that they can be read. ``fused.py`` computes the same in one pass.

Every function maps draft logits z and target logits t, both [..., V], to values [...] in fp32 (fp64 stays fp64).
q = softmax(z) is the drafter's distribution, p = softmax(t) the target's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log q[label] in nats."""
    log_q = _wide(draft_logits).log_softmax(-1)
    return -log_q.gather(-1, labels[..., None]).squeeze(-1)


def soft_cross_entropy(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return -sum p log q in nats: KL(p || q) plus the entropy of p."""
    return -(_wide(target_logits).softmax(-1) * _wide(draft_logits).log_softmax(-1)).sum(-1)


def kl_divergence(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return KL(p || q) in nats."""
    entropy = torch.special.entr(_wide(target_logits).softmax(-1)).sum(-1)
    return soft_cross_entropy(draft_logits, target_logits) - entropy


def reverse_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return KL(q || p) in nats; finite where p underflows, since log p comes from the logits."""
    log_q, log_p = _wide(draft_logits).log_softmax(-1), _wide(target_logits).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2, in nats, from 0 to ln 2."""
    log_q, log_p = _wide(draft_logits).log_softmax(-1), _wide(target_logits).log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)


def negative_log_acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return -log of ``acceptance``."""
    return -acceptance(draft_logits, target_logits).log()


def adaptive_mix(draft_logits: Tensor, target_logits: Tensor, eta: float) -> Tensor:
    """Return c KL(p || q) + (1 - c) TV with c = exp(-eta * acceptance), through which no gradient flows."""
    share = torch.exp(-eta * acceptance(draft_logits, target_logits)).detach()
    return share * kl_divergence(draft_logits, target_logits) + (1.0 - share) * total_variation(
        draft_logits, target_logits
    )


def l1_distance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return ||q - p||_1, from 0 to 2."""
    return (_wide(draft_logits).softmax(-1) - _wide(target_logits).softmax(-1)).abs().sum(-1)


def total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return half of ``l1_distance``: the chance that a token drawn from q is rejected against p."""
    return 0.5 * l1_distance(draft_logits, target_logits)


def acceptance(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the chance that a token drawn from q is accepted against p: sum min(p, q)."""
    return 1.0 - total_variation(draft_logits, target_logits)


def binary_cross_entropy(confidence_logits: Tensor, acceptance: Tensor) -> Tensor:
    """Return the cross-entropy of sigmoid(confidence_logits) [...] against a chance of acceptance [...]."""
    wide = _wide(confidence_logits)
    return functional.binary_cross_entropy_with_logits(wide, acceptance.to(wide.dtype), reduction="none")


def pace_weights(confidence: Tensor, mask: Tensor, smoothing: float) -> Tensor:
    """Return D-PACE's weights [..., K] of the slots of blocks (arXiv 2605.18810, eq. 7-9); no gradient flows.

    ``confidence`` [..., K] is the draft's probability of each label, ``mask`` [..., K] True on the slots that count:
    a block's first ones. With c_i = (1 - smoothing) * confidence_i + smoothing, slot j weighs
    sum_(m >= j) prod_(i <= m) c_i over the slots m that count, and 0 where it does not count.
    """
    smoothed = (1.0 - smoothing) * confidence.detach() + smoothing
    reach = torch.where(mask, smoothed, 0.0).cumprod(-1)
    return reach.flip(-1).cumsum(-1).flip(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
