"""Train a drafter on one text until it knows it by heart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.contracts import Batch, Features

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.drafters.base import Drafter
    from deepspec.targets.target import Target


def overfit(
    target: Target, drafter: Drafter, text: list[int], first: int, layer_ids: Sequence[int], steps: int
) -> None:
    """Train on one text whose supervised part begins at ``first``, every anchor at every step."""
    ids = torch.tensor([text])
    anchors = torch.arange(first, len(text) - 1)
    batch = Batch(
        input_ids=ids,
        segment_ids=torch.ones_like(ids),
        position_ids=torch.arange(len(text)).unsqueeze(0),
        loss_mask=torch.arange(len(text)).unsqueeze(0) >= first,
        anchor_indices=anchors.unsqueeze(0),
        anchor_mask=torch.ones(1, len(anchors), dtype=torch.bool),
    )
    features: Features = target.features(batch, layer_ids)
    denominators = drafter.denominators(batch)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    drafter.train()
    for _ in range(steps):
        sums = drafter(batch, features).sums
        loss = torch.stack([drafter.coefficients[k] * v / denominators[k] for k, v in sums.items()]).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    drafter.eval()
