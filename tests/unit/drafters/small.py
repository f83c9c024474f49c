"""Tiny drafters, batches and samplers for the tests of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspec.contracts import Batch, Features, TargetInfo
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.dspark.model import DSparkDrafter
from deepspec.nn.head import FrozenHead

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB, WIDTH, TAPS = 97, 32, (0, 2, 4)


def target_info(**over: Any) -> TargetInfo:
    values: dict[str, Any] = {
        "name": "tiny",
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return TargetInfo(**values | over)


def drafter(seed: int = 0, std: float = 0.3, info: TargetInfo | None = None, **over: Any) -> DSparkDrafter:
    """Return a bound drafter whose every weight is random, the Markov and confidence heads too."""
    values: dict[str, Any] = {"num_layers": 2, "gamma": 5, "markov_rank": 8}
    info = info or target_info()
    made = DSparkConfig(**values | over).build(info, TAPS, VOCAB - 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            parameter.copy_(1.0 + noise if "norm" in name else noise)
    embedding = torch.randn(info.vocab_size, info.hidden_size, generator=generator)
    weight = torch.randn(info.vocab_size, info.hidden_size, generator=generator) * 0.4
    made.bind(FrozenHead.from_tensors(info, embedding, weight))
    return made


def row(length: int, anchors: Sequence[int], seed: int = 0, supervised_from: int = 2) -> tuple[Batch, Features]:
    """Return one document of ``length`` tokens with its features."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB - 1, (1, length), generator=generator)
    batch = Batch(
        input_ids=ids,
        segment_ids=torch.ones_like(ids),
        position_ids=torch.arange(length)[None],
        loss_mask=(torch.arange(length) >= supervised_from)[None],
        anchor_indices=torch.tensor([list(anchors)]),
        anchor_mask=torch.ones(1, len(anchors), dtype=torch.bool),
    )
    hidden = torch.randn(1, length, len(TAPS) * WIDTH, generator=generator)
    return batch, Features(hidden, torch.randn(1, length, WIDTH, generator=generator))


def greedy(logits: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    probabilities = logits.softmax(-1)
    place = probabilities.argmax()
    return place if ids is None else ids[place], probabilities


class Forced:
    """A sampler that says given tokens, and remembers the logits it was shown."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.logits = list(tokens), []  # type: ignore[var-annotated]

    def __call__(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor | None = None,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.logits.append(logits)
        return torch.tensor(self.tokens[len(self.logits) - 1]), logits.softmax(-1)


def draft_logits(model: DSparkDrafter, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
    """Return teacher-forced logits [B, A, K, V] written out plainly."""
    states = model.block_states(batch, hidden)
    logits = model.head.logits(states)
    if model.markov_head is None:
        return logits
    index = batch.anchor_indices[..., None] + torch.arange(model.conventions.gamma)
    index = index.clamp(max=batch.input_ids.shape[1] - 1)
    previous = batch.input_ids.gather(1, index.flatten(1)).view_as(index)
    return logits + model.markov_head.markov_w1.weight[previous] @ model.markov_head.markov_w2.weight.t()
