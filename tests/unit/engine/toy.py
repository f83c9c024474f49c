"""A drafter of a few parameters with uneven weights, its batches, and a run built from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspec.config.schema import EngineConfig, OptimConfig
from deepspec.contracts import Batch, Conventions, Features, LossOutput, Ratio, TargetInfo
from deepspec.drafters.base import Drafter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepspec.engine.base import Engine
    from deepspec.engine.distributed import Ranks

HIDDEN, LENGTH, GLOBAL_BATCH = 8, 6, 4

INFO = TargetInfo(
    name="toy",
    model_type="toy",
    vocab_size=16,
    hidden_size=HIDDEN,
    num_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=16,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)


@dataclass(frozen=True)
class ToyConfig:
    """Configuration of ``ToyDrafter``."""

    gamma: int = 2
    width: int = 12
    overflow_at: int = -1

    def problems(self) -> list[str]:
        return []

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> ToyDrafter:
        return ToyDrafter(self, target, target_layer_ids, mask_token_id)


class ToyDrafter(Drafter):
    """Two loss terms with different weights per token, one of them often zero."""

    def __init__(self, config: ToyConfig, info: TargetInfo, layer_ids: tuple[int, ...], mask_token_id: int) -> None:
        super().__init__()
        self.conventions = Conventions("anchor_first", config.gamma, layer_ids, mask_token_id, None)
        self.coefficients = {"square": 0.7, "rare": 1.3}
        generator = torch.Generator().manual_seed(5)
        self.up = nn.Linear(info.hidden_size, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.table = nn.Embedding(info.vocab_size, config.width)
        self.down = nn.Linear(config.width, info.hidden_size)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def denominators(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"square": batch.loss_mask.sum().float(), "rare": self._rare(batch).sum()}

    def _rare(self, batch: Batch) -> torch.Tensor:
        return batch.loss_mask.float() * (batch.input_ids % 5 == 0).float() * 0.5

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        state = self.norm(torch.tanh(self.up(features.hidden))) + self.table(batch.input_ids)
        error = self.down(state).float() - features.last_hidden.float()
        mask, rare = batch.loss_mask.float(), self._rare(batch)
        square = (error.square().mean(-1) * mask).sum()
        absolute = (error.abs().mean(-1) * rare).sum()
        per_position = error.detach().abs().mean(dim=(0, 1))[:2]
        metrics = {
            "acceptance": Ratio(per_position, torch.ones(2)),
            "expected_length": Ratio(square.detach(), mask.sum()),
        }
        return LossOutput({"square": square, "rare": absolute}, metrics)


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input_ids [T], loss_mask [T]) of sample ``index``; some supervise one token, some none."""
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, 16, (LENGTH,), generator=generator)
    mask = torch.arange(LENGTH) < (0, 1, 2, 6)[index % 4]
    return ids, mask


def make_batch(indices: list[int]) -> Batch:
    """Collate samples into a batch."""
    pairs = [sample(i) for i in indices]
    ids, mask = torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
    return Batch(
        input_ids=ids,
        segment_ids=torch.ones_like(ids),
        position_ids=torch.arange(LENGTH).expand_as(ids),
        loss_mask=mask,
        anchor_indices=torch.zeros(len(indices), 1, dtype=torch.int64),
        anchor_mask=torch.ones(len(indices), 1, dtype=torch.bool),
        sample_ids=tuple(map(str, indices)),
    )


def features(batch: Batch) -> Features:
    """Stand-in for the frozen target: a fixed function of the tokens."""
    table = torch.randn(16, 2 * HIDDEN, generator=torch.Generator().manual_seed(9))
    both = table[batch.input_ids]
    return Features(hidden=both[..., :HIDDEN], last_hidden=both[..., HIDDEN:])


def batches(
    start: int, *, ranks: Ranks, micro_batch_size: int, total: int = 10**6
) -> Iterator[tuple[int, list[Batch]]]:
    """Yield this rank's micro-batches of each step: the same four samples a step however they are split."""
    per_rank = GLOBAL_BATCH // ranks.world_size
    for step in range(start, total):
        first = step * GLOBAL_BATCH + ranks.rank * per_rank
        indices = list(range(first, first + per_rank))
        chunks = [indices[i : i + micro_batch_size] for i in range(0, per_rank, micro_batch_size)]
        yield step, [make_batch(chunk) for chunk in chunks]


ENGINE = EngineConfig(kind="plain", precision="fp32", micro_batch_size=4, global_batch_size=GLOBAL_BATCH, device="cpu")
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.0, warmup_ratio=0.0)


def make_drafter() -> ToyDrafter:
    """Build the toy with its fixed weights."""
    return ToyConfig().build(INFO, (1, 2), 3)


def make_engine(drafter: Drafter, ranks: Ranks, engine: EngineConfig = ENGINE, optim: OptimConfig = OPTIM) -> Engine:
    """Build the engine that the configuration names."""
    from deepspec.engine.build import build_engine

    return build_engine(drafter, ranks=ranks, engine=engine, optim=optim)


def with_engine(**changes: Any) -> EngineConfig:
    """Return the toy's engine configuration with changes."""
    return replace(ENGINE, **changes)
