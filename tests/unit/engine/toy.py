"""A drafter of a few parameters with uneven weights, its batches, and training runs built from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspec.checkpoint.store import CheckpointStore
from deepspec.config.schema import EngineConfig, OptimConfig
from deepspec.contracts import Batch, Conventions, Features, LossOutput, Ratio, TargetInfo
from deepspec.drafters.base import Drafter
from deepspec.engine.build import build_engine
from deepspec.engine.distributed import Ranks
from deepspec.engine.loop import Hook, Limits, Trainer

HIDDEN, LENGTH, GLOBAL_BATCH = 8, 6, 4
ONE_RANK = Ranks(0, 0, 1, torch.device("cpu"))
ENGINE = EngineConfig(kind="plain", precision="fp32", micro_batch_size=4, global_batch_size=GLOBAL_BATCH, device="cpu")
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.0, warmup_ratio=0.0)

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
    eos_token_ids=(2,),
)


@dataclass(frozen=True)
class ToyConfig:
    """Configuration of ``ToyDrafter``."""

    gamma: int = 2
    width: int = 12

    def problems(self) -> list[str]:
        return []

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> ToyDrafter:
        return ToyDrafter(self, target, target_layer_ids, mask_token_id)


class ToyDrafter(Drafter):
    """Two loss terms with different weights per token; the rare one often weighs nothing in a micro-batch."""

    def __init__(self, config: ToyConfig, info: TargetInfo, layer_ids: tuple[int, ...], mask_token_id: int) -> None:
        super().__init__()
        self.conventions = Conventions("anchor_first", config.gamma, layer_ids, mask_token_id, None)
        self.coefficients = {"square": 0.7, "rare": 1.3}
        self.up = nn.Linear(info.hidden_size, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.table = nn.Embedding(info.vocab_size, config.width)
        self.gain = nn.Parameter(torch.ones(1))  # a parameter of the drafter itself, smaller than the ranks are many
        self.down = nn.Linear(config.width, info.hidden_size)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.3)

    def denominators(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"square": batch.loss_mask.sum().float(), "rare": self._rare(batch).sum()}

    def _rare(self, batch: Batch) -> torch.Tensor:
        return batch.loss_mask.float() * (batch.input_ids % 5 == 0).float() * 0.5

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        state = self.norm(torch.tanh(self.up(features.hidden))) + self.table(batch.input_ids) * (1 + self.gain)
        error = self.down(state).float() - features.last_hidden.float()
        mask, rare = batch.loss_mask.float(), self._rare(batch)
        square = (error.square().mean(-1) * mask).sum()
        absolute = (error.abs().mean(-1) * rare).sum()
        metrics = {
            "acceptance": Ratio(error.detach().abs().mean(dim=(0, 2))[:2], torch.ones(2)),
            "expected_length": Ratio(square.detach(), mask.sum()),
        }
        return LossOutput({"square": square, "rare": absolute}, metrics)


def make_drafter() -> ToyDrafter:
    """Build the toy with its fixed weights."""
    return ToyConfig().build(INFO, (1, 2), 3)


def make_batch(indices: Sequence[int]) -> Batch:
    """Collate samples; of four in a row one supervises nothing, one a single token, one two and one all six."""
    rows = []
    for index in indices:
        generator = torch.Generator().manual_seed(1000 + index)
        rows.append(torch.randint(0, 16, (LENGTH,), generator=generator))
    ids = torch.stack(rows)
    supervised = torch.tensor([(0, 1, 2, 6)[i % 4] for i in indices])
    return Batch(
        input_ids=ids,
        segment_ids=torch.ones_like(ids),
        position_ids=torch.arange(LENGTH).expand_as(ids),
        loss_mask=torch.arange(LENGTH) < supervised[:, None],
        anchor_indices=torch.zeros(len(indices), 1, dtype=torch.int64),
        anchor_mask=torch.ones(len(indices), 1, dtype=torch.bool),
        sample_ids=tuple(map(str, indices)),
    )


def features(batch: Batch) -> Features:
    """Stand in for the frozen target: a fixed function of the tokens."""
    table = torch.randn(16, 2 * HIDDEN, generator=torch.Generator().manual_seed(9))
    both = table[batch.input_ids]
    return Features(hidden=both[..., :HIDDEN], last_hidden=both[..., HIDDEN:])


def batches(start: int, ranks: Ranks, micro_batch_size: int) -> Iterator[tuple[int, list[Batch]]]:
    """Yield this rank's micro-batches, step by step: the same four samples a step however they are split."""
    share = GLOBAL_BATCH // ranks.world_size
    step = start
    while True:
        first = step * GLOBAL_BATCH + ranks.rank * share
        chunks = [range(i, i + micro_batch_size) for i in range(first, first + share, micro_batch_size)]
        yield step, [make_batch(chunk) for chunk in chunks]
        step += 1


def make_trainer(
    ranks: Ranks = ONE_RANK,
    *,
    steps: int = 20,
    engine: EngineConfig = ENGINE,
    optim: OptimConfig = OPTIM,
    hooks: Sequence[Hook] = (),
    drafter: Drafter | None = None,
    trainer: type[Trainer] = Trainer,
    max_bad_steps: int = 5,
    seconds: float = 0.0,
) -> Trainer:
    """Build a trainer of the toy."""
    drafter = drafter or make_drafter()
    return trainer(
        drafter=drafter,
        engine=build_engine(drafter, ranks=ranks, engine=engine, optim=optim),
        batches=lambda start: batches(start, ranks, engine.micro_batch_size),
        features=features,
        schedule=lambda step: 1.0 / (1 + step),
        limits=Limits(steps, 10, GLOBAL_BATCH, 1, max_bad_steps),
        hooks=hooks,
        seconds=seconds,
    )


def make_store(folder: Path, drafter: Drafter, *, keep: int = 2) -> CheckpointStore:
    """Build the checkpoint store of a toy run."""
    return CheckpointStore(folder, drafter=drafter, config=ToyConfig(), info=INFO, fingerprints={}, keep=keep)


def engine_config(**changes: Any) -> EngineConfig:
    """Return the toy's engine configuration with changes."""
    return replace(ENGINE, **changes)


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all values as one vector, in the order of the names."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative L2 distance."""
    return ((value - reference).norm() / reference.norm()).item()
