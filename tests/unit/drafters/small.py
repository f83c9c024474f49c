"""Tiny drafters, batches and samplers for the tests of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspec.contracts import Batch, Committed, Features, TargetInfo
from deepspec.drafters.dflash.config import DFlashConfig
from deepspec.drafters.dspark.config import DSparkConfig
from deepspec.drafters.eagle3.config import Eagle3Config
from deepspec.drafters.mtp.config import MTPConfig
from deepspec.nn.head import FrozenHead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepspec.drafters.dflash.model import DFlashDrafter
    from deepspec.drafters.dspark.model import DSparkDrafter
    from deepspec.drafters.eagle3.model import Eagle3Drafter
    from deepspec.drafters.mtp.model import MTPDrafter

VOCAB, WIDTH, TAPS = 97, 32, (0, 2, 4)
FIELDS = ("input_ids", "segment_ids", "position_ids", "loss_mask", "anchor_indices", "anchor_mask")


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
    """Return a bound DSpark drafter whose every weight is random, the Markov and confidence heads too."""
    values: dict[str, Any] = {"num_layers": 2, "gamma": 5, "markov_rank": 8}
    info = info or target_info()
    return random_weights(DSparkConfig(**values | over).build(info, TAPS, VOCAB - 1), info, seed, std)


def dflash(seed: int = 0, std: float = 0.3, info: TargetInfo | None = None, **over: Any) -> DFlashDrafter:
    """Return a bound DFlash drafter with random weights."""
    values: dict[str, Any] = {"num_layers": 2, "gamma": 5}
    info = info or target_info()
    return random_weights(DFlashConfig(**values | over).build(info, TAPS, VOCAB - 1), info, seed, std)


def eagle3(seed: int = 0, std: float = 0.3, info: TargetInfo | None = None, **over: Any) -> Eagle3Drafter:
    """Return a bound Eagle3 drafter with random weights."""
    info = info or target_info()
    return random_weights(Eagle3Config(**{"ttt_length": 5} | over).build(info, TAPS, VOCAB - 1), info, seed, std)


def mtp(seed: int = 0, std: float = 0.3, info: TargetInfo | None = None, **over: Any) -> MTPDrafter:
    """Return a bound MTP-1 drafter with random weights."""
    info = info or target_info()
    return random_weights(MTPConfig(**over).build(info, TAPS, VOCAB - 1), info, seed, std)


def random_weights(made: Any, info: TargetInfo, seed: int = 0, std: float = 0.3) -> Any:
    """Fill every weight of a drafter with noise, norms around 1, and bind it to a random head."""
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


def packed(first: tuple[Batch, Features], second: tuple[Batch, Features]) -> tuple[Batch, Features]:
    """Return two documents in one row."""
    (a, fa), (b, fb) = first, second
    length = a.input_ids.shape[1]
    batch = Batch(
        input_ids=torch.cat((a.input_ids, b.input_ids), 1),
        segment_ids=torch.cat((a.segment_ids, b.segment_ids + 1), 1),
        position_ids=torch.cat((a.position_ids, b.position_ids), 1),
        loss_mask=torch.cat((a.loss_mask, b.loss_mask), 1),
        anchor_indices=torch.cat((a.anchor_indices, b.anchor_indices + length), 1),
        anchor_mask=torch.cat((a.anchor_mask, b.anchor_mask), 1),
    )
    return batch, Features(torch.cat((fa.hidden, fb.hidden), 1), torch.cat((fa.last_hidden, fb.last_hidden), 1))


def padded(case: tuple[Batch, Features], length: int, anchors: int) -> tuple[Batch, Features]:
    """Return a row with padding behind its ``length`` tokens, and padding anchors."""
    batch, features = case
    more, extra = length - batch.input_ids.shape[1], anchors - batch.anchor_indices.shape[1]
    pad = torch.nn.functional.pad
    padded = Batch(
        input_ids=pad(batch.input_ids, (0, more), value=5),
        segment_ids=pad(batch.segment_ids, (0, more)),
        position_ids=pad(batch.position_ids, (0, more)),
        loss_mask=pad(batch.loss_mask, (0, more)),
        anchor_indices=pad(batch.anchor_indices, (0, extra)),
        anchor_mask=pad(batch.anchor_mask, (0, extra)),
    )
    hidden = pad(features.hidden, (0, 0, 0, more), value=3.0)
    return padded, Features(hidden, pad(features.last_hidden, (0, 0, 0, more), value=3.0))


def stacked(first: tuple[Batch, Features], second: tuple[Batch, Features]) -> tuple[Batch, Features]:
    """Return the rows of two batches of one shape."""
    (a, fa), (b, fb) = first, second
    joined: dict[str, Any] = {n: torch.cat((getattr(a, n), getattr(b, n))) for n in FIELDS}
    features = Features(torch.cat((fa.hidden, fb.hidden)), torch.cat((fa.last_hidden, fb.last_hidden)))
    return Batch(**joined), features


def known(batch: Batch, features: Features, start: int, stop: int) -> Committed:
    """Return positions ``start:stop`` of the first row as a decoder hands them to a drafter."""
    tokens = batch.input_ids[0].tolist()
    return Committed(tokens, features.hidden[0], features.last_hidden[0]).part(start, stop)


def only(hidden: torch.Tensor) -> Committed:
    """Return features [t, C*D] of tokens that do not matter."""
    return Committed([0] * len(hidden), hidden, torch.zeros(len(hidden), WIDTH, dtype=hidden.dtype))


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


def draft_logits(model: Any, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
    """Return teacher-forced logits [B, A, K, V] written out plainly."""
    states = model.block_states(batch, hidden)[:, :, model.conventions.silent_rows :]
    logits = model.head.logits(states)
    if getattr(model, "markov_head", None) is None:
        return logits
    index = batch.anchor_indices[..., None] + torch.arange(model.conventions.gamma)
    index = index.clamp(max=batch.input_ids.shape[1] - 1)
    previous = batch.input_ids.gather(1, index.flatten(1)).view_as(index)
    features = model.markov_head(states, model.markov_head.markov_w1(previous))
    return logits + features @ model.markov_head.markov_w2.weight.t()
