"""The dataclasses that pass between the parts of DeepSpec, and the legend of shape letters.

Letters used in every shape comment of the code base:

    B  batch rows            T  tokens of a row          C  captured target layers
    D  hidden width          A  anchors of a row         K  drafted positions of a block (gamma)
    V  vocabulary            R  rows of a loss call      Dh width of one attention head
    N  input rows of a block H, Hkv heads of queries, of keys and values      r  rank of a small head
    Vd tokens that a drafter can propose, V unless its vocabulary is reduced

Positions. An anchor sits at position ``a`` on a known token. Its block drafts the K tokens at positions
``a+1 .. a+K``; the context it may read are the target's features of positions ``< a``.

Layer ids. ``target_layer_ids`` holds ``k`` for the output of decoder layer ``k`` counted from 0, before the final
norm; ``-1`` is the output of the embedding.

This module does not import torch when it runs, so that a configuration can be composed without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

BlockLayout = Literal["anchor_first", "fill_in", "autoregressive"]


@dataclass(frozen=True)
class Conversation:
    """One line of a conversation file.

    ``messages`` holds (role, content) pairs. ``finish_reason`` says why the last answer ended: ``stop`` (the target
    said its end-of-turn token), ``length`` (it was cut), or None when there is no answer yet or nobody knows.
    """

    id: str
    messages: tuple[tuple[str, str], ...]
    source: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True)
class Sample:
    """A tokenised conversation: ``input_ids`` and ``loss_mask`` have the same length T."""

    id: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str = ""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, padded on the right.

    A row may hold several documents; ``segment_ids`` numbers them from 1 and is 0 on padding, and positions restart
    with each document. Nothing ever attends across a segment.
    """

    input_ids: Tensor  # [B, T] int64
    segment_ids: Tensor  # [B, T] int64, 0 = padding
    position_ids: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True where the target itself would generate the token
    anchor_indices: Tensor  # [B, A] int64, index into T (not a position inside the document)
    anchor_mask: Tensor  # [B, A] bool, False on padding anchors
    sample_ids: tuple[str, ...] = ()

    def to(self, device: object) -> Batch:
        """Return the batch with every tensor on ``device``."""
        moved = {k: v.to(device) if hasattr(v, "to") else v for k, v in vars(self).items()}
        return Batch(**moved)


@dataclass(frozen=True)
class Features:
    """What the frozen target says about a batch of tokens."""

    hidden: Tensor  # [B, T, C*D], layers concatenated in the order of target_layer_ids
    last_hidden: Tensor  # [B, T, D], after the final norm: head(last_hidden) are the target's logits
    log_sum: Tensor | None = None  # [B, T] fp32, log sum exp of those logits where the next token is supervised, else 0
    top: Tensor | None = None  # [B, T] int64, the likeliest token there; both or neither are known


class Ratio(NamedTuple):
    """A weighted sum and the weight it has to be divided by, once, after every reduction.

    Both are scalars (0-d fp32 tensors or floats), or vectors of equal length for per-position quantities.
    """

    numerator: Tensor
    denominator: Tensor


class LossOutput(NamedTuple):
    """What one forward pass of an objective returns; a named tuple, so that ZeRO-3's hooks find the tensors in it.

    ``sums[name]`` is the differentiable weighted sum of one loss term; the loop multiplies it by
    ``coefficients[name] / denominators[name]`` with the denominators of the whole optimiser step.
    ``metrics`` are detached.
    """

    sums: Mapping[str, Tensor]
    metrics: Mapping[str, Ratio] = {}


class TokenSampler(Protocol):
    """Turns logits into a token and the very probabilities that the acceptance rule will use."""

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map ``logits`` [V] to (token: 0-d int64, probabilities: [V] fp32).

        With ``ids`` [Vd] both are about these tokens alone: [Vd] logits give a token out of ``ids``, and [Vd].
        """
        ...


@dataclass(frozen=True)
class Committed:
    """The next t positions of a text that are decided, and what the target says about them."""

    tokens: Sequence[int]  # t
    hidden: Tensor  # [t, C*D], as Features.hidden
    last_hidden: Tensor  # [t, D], as Features.last_hidden

    def part(self, start: int, stop: int) -> Committed:
        """Return the positions ``start:stop`` of these."""
        return Committed(self.tokens[start:stop], self.hidden[start:stop], self.last_hidden[start:stop])


@dataclass(frozen=True)
class Proposal:
    """A drafted block of ``k <= gamma`` tokens."""

    tokens: Tensor  # [k] int64
    probabilities: Tensor  # [k, V] fp32, the distributions the tokens were drawn from
    confidence_logits: Tensor | None = None  # [k] fp32, log-odds that slot j is accepted given that all before were

    @property
    def confidence(self) -> Tensor | None:
        """[k] fp32: that chance, as the drafter was trained to say it."""
        return None if self.confidence_logits is None else self.confidence_logits.sigmoid()


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter has to know of its target, in plain values. Written into every checkpoint and package."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, object]  # one flat dict of transformers 5 (rope_type, rope_theta, ...)
    embed_scale: float = 1.0  # the embedding's output is its row times this
    logit_scale: float = 1.0  # logits = softcap(logit_scale * (W h + b))
    logit_softcap: float | None = None
    fingerprint: str = ""  # hash of config and of sampled weights; tells another revision apart
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Conventions:
    """How the blocks of a trained drafter are to be read; a package that leaves one of these out is refused."""

    block_layout: BlockLayout
    gamma: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    sliding_window: int | None
    is_causal: bool = False

    @property
    def block_size(self) -> int:
        """Input rows of a block: K, or K+1 where the anchor's row predicts nothing."""
        return self.gamma + self.silent_rows

    @property
    def silent_rows(self) -> int:
        """Rows at the head of a block that predict nothing."""
        return 1 if self.block_layout == "fill_in" else 0
