"""The small heads of a DSpark as folders name them. A drafter without a Markov head gets one of zeros.

SGLang's DSpark asks for a Markov head, and zeros in ``markov_w2`` add nothing to any logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspec.export.layouts.common import IDLE_RANK, Source, weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
KINDS = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
"""What only one kind of Markov head has."""
NOT_QUANTISED = ("fc$", "markov_head.*", "confidence_head.*")


def dspark_tensors(source: Source) -> dict[str, Tensor]:
    """Return the drafter's weights under DSpark's published names, with a Markov head in any case."""
    tensors = weights(source)
    if W1 not in tensors:
        tensors[W1] = torch.zeros(source.target.vocab_size, IDLE_RANK)
        tensors[W2] = torch.zeros(source.draft_vocab_size, IDLE_RANK)
    return tensors


def head_keys(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the keys of Markov and confidence head, as the tensors show them."""
    rank = tensors[W1].shape[1]
    confidence = tensors.get(CONFIDENCE)
    width = tensors["norm.weight"].shape[0]
    return {
        "markov_rank": rank,
        "markov_head_type": next((kind for name, kind in KINDS.items() if name in tensors), "vanilla"),
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.shape[1] == width + rank,
    }
