"""What the rest of DeepSpec asks of a drafter.

A drafter is one folder (here, or in a package of its own) that holds a configuration dataclass and a module. The engine
trains the module through ``forward``; the decoder drives it through ``start``, ``extend`` and ``propose``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from deepspec.errors import ConfigError, DeepSpecError
from deepspec.log import get_logger
from deepspec.nn.vocabulary import DraftVocabulary, id_problems, offsets, target_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from deepspec.contracts import (
        Batch,
        Committed,
        Conventions,
        Features,
        LossOutput,
        Proposal,
        TargetInfo,
        TokenSampler,
    )
    from deepspec.nn.attention import AttentionBackend
    from deepspec.nn.head import FrozenHead

log = get_logger(__name__)

LossPrecision = Literal["auto", "exact", "common_mode", "bf16_logits"]


NOT_CHOSEN = -1
"""Every entry of ``d2t`` before the tokens are chosen; an offset is never negative."""


def require_finite(logits: Tensor) -> None:
    """Refuse logits that are not finite: sampling from them gives token ids that do not exist."""
    if not math.isfinite(float(logits.sum())):
        raise DeepSpecError(
            "the drafter's logits are not finite (a state overflowed, or the weights are damaged): "
            "load target and drafter in bf16 or fp32, and check the package"
        )


class DrafterConfig(Protocol):
    """A frozen dataclass of plain values that knows how to build its drafter."""

    @property
    def gamma(self) -> int:
        """Drafted tokens of a block."""
        ...

    def problems(self) -> list[str]:
        """List every mistake that the values alone show, each with the key to change."""
        ...

    def build(self, target: TargetInfo, target_layer_ids: tuple[int, ...], mask_token_id: int) -> Drafter:
        """Build the drafter with random weights in fp32 on PyTorch's default device.

        That is the CPU; it is ``meta`` where a file is checked against the drafter before memory is taken for it.
        """
        ...


class Drafter(nn.Module):
    """Base of every drafter: a module that is bound to the target's frozen embedding and head.

    The frozen tensors are not parameters of the drafter: they are neither trained, nor saved, nor counted.

    A drafter that can only propose some of the target's tokens calls ``reduce_vocabulary`` when it is built; the buffer
    ``d2t`` then says which, and is saved with the weights.
    """

    d2t: Tensor | None
    """[Vd] int64: target id = draft id + d2t[draft id]; None where the whole vocabulary can be proposed."""

    conventions: Conventions
    coefficients: Mapping[str, float]
    """Weight of each loss term, by the names of ``LossOutput.sums``."""
    loss_precision: LossPrecision = "auto"
    """``engine.loss_precision``; whoever builds a training run sets it on the drafter."""
    attention_backend: AttentionBackend = "auto"
    """``engine.attention``, likewise."""
    confidence_temperatures: tuple[float, ...] | None = None
    """One for each slot (K), by which the log-odds of its confidence are divided; None as trained. A calibrated package
    sets it."""

    def __init__(self) -> None:
        super().__init__()
        self._head: tuple[FrozenHead, ...] = ()
        self._whole_size = 0
        self._vocabulary: tuple[DraftVocabulary, ...] = ()
        self.register_buffer("d2t", None)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose outputs the drafter reads; ``Features.hidden`` holds those."""
        return self.conventions.target_layer_ids

    @property
    def predicts_acceptance(self) -> bool:
        """Whether ``propose`` says how likely each slot is accepted."""
        return False

    @property
    def head(self) -> FrozenHead:
        """The target's embedding and head.

        Raises:
            RuntimeError: ``bind`` was not called.
        """
        if not self._head:
            raise RuntimeError("the drafter is not bound to a target: call bind(head) first")
        return self._head[0]

    def bind(self, head: FrozenHead) -> None:
        """Use the target's embedding and head from now on."""
        self._head = (head,)
        self._renew_vocabulary()

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that can be proposed, None for the target's whole vocabulary.

        Raises:
            RuntimeError: the vocabulary is reduced, but not chosen or not bound to a target.
        """
        if self.d2t is None:
            return None
        if not self._vocabulary:
            raise RuntimeError("the drafter's vocabulary is not ready: call bind(head) and set_vocabulary(ids) first")
        return self._vocabulary[0]

    @property
    def draft_head(self) -> FrozenHead:
        """The target's head, restricted to the tokens that can be proposed."""
        return self.head if self.vocabulary is None else self.vocabulary.head

    def reduce_vocabulary(self, size: int, whole_size: int) -> None:
        """Let the drafter propose ``size`` (Vd) of the target's ``whole_size`` (V) tokens; which is said later."""
        if not 2 <= size <= whole_size:  # noqa: PLR2004 - one token leaves nothing to choose
            raise ConfigError(f"drafter.draft_vocab_size={size} must be in 2 .. {whole_size}, the target's vocabulary")
        self._whole_size = whole_size
        self.d2t = torch.full((size,), NOT_CHOSEN, dtype=torch.int64)

    def set_vocabulary(self, ids: Sequence[int] | Tensor) -> None:
        """Choose the tokens that can be proposed: Vd target ids in rising order.

        Raises:
            ConfigError: the drafter proposes the whole vocabulary, or ``ids`` breaks a rule.
        """
        if self.d2t is None:
            raise ConfigError("drafter.draft_vocab_size is null, the whole vocabulary: give it a number to choose ids")
        chosen = torch.as_tensor(ids, dtype=torch.int64, device=self.d2t.device)
        problems = id_problems(chosen, self._whole_size)
        if len(chosen) != len(self.d2t):
            problems.insert(0, f"{len(chosen)} ids were given for drafter.draft_vocab_size={len(self.d2t)}")
        if problems:
            raise ConfigError("draft vocabulary: " + "; ".join(problems))
        self.d2t.copy_(offsets(chosen))
        self._renew_vocabulary()

    def _renew_vocabulary(self) -> None:
        """Cut the head anew, after a change of the target or of ``d2t``, once both are known."""
        self._vocabulary = ()
        if self.d2t is not None and self._head and int(self.d2t[0]) != NOT_CHOSEN:
            self._vocabulary = (DraftVocabulary.of(self.head, target_ids(self.d2t)),)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Take over saved weights; those come with the vocabulary that they were trained for."""
        before = self._vocabulary
        super()._load_from_state_dict(*args, **kwargs)
        if self.d2t is not None:
            self._renew_vocabulary()
            if before and self._vocabulary and not before[0].ids.equal(self._vocabulary[0].ids):
                log.warning("the draft vocabulary of the saved weights is kept; the one chosen before was another")

    def initialise_from(self, target_model: nn.Module) -> list[str]:  # noqa: ARG002 - for subclasses
        """Copy what fits from the target's own layers; return a line for each part that was taken."""
        raise ConfigError(f"drafter.init: {type(self).__name__} cannot start from its target; set it to random")

    def fit(self, examples: Sequence[tuple[Batch, Features]]) -> list[str]:  # noqa: ARG002 - for subclasses
        """Fit to ``examples`` what can be fitted without gradients; return a line for each part."""
        raise ConfigError(f"drafter.init: {type(self).__name__} cannot be fitted; set it to another value")

    def denominators(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weight (0-d fp32) of each loss term, from the batch alone."""
        raise NotImplementedError

    def forward(self, batch: Batch, features: Features) -> LossOutput:
        """Return the weighted sums of the loss terms and the detached metrics of a micro-batch."""
        raise NotImplementedError

    def start(self, max_length: int) -> Any:
        """Return an empty decoding state for one sequence of at most ``max_length`` positions."""
        raise NotImplementedError

    def extend(self, state: Any, committed: Committed) -> None:
        """Append the next t committed positions to the state."""
        raise NotImplementedError

    def propose(self, state: Any, anchor: int, num_tokens: int, sampler: TokenSampler) -> Proposal:
        """Draft ``num_tokens <= gamma`` tokens after ``anchor``, which sits right behind the state's positions."""
        raise NotImplementedError
