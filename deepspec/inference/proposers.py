"""Who proposes the tokens that the target verifies: nobody, the text so far, or a drafter.

All three go through the same loop in ``decoder.py``, so their speeds can be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from deepspec.contracts import Proposal
from deepspec.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from deepspec.contracts import Committed
    from deepspec.drafters.base import Drafter
    from deepspec.inference.sampling import Sampler


class Proposer(Protocol):
    """Keeps what it needs to know of one sequence, and drafts its continuation."""

    gamma: int
    """Most tokens it can draft in a round."""
    layer_ids: tuple[int, ...]
    """Target layers whose output ``extend`` is given."""

    def start(self, max_length: int) -> None:
        """Forget the last sequence; the next one has at most ``max_length`` positions."""
        ...

    def extend(self, committed: Committed) -> None:
        """Take in the next t positions of the text."""
        ...

    def propose(self, anchor: int, num_tokens: int, sampler: Sampler) -> Proposal | None:
        """Draft at most ``num_tokens`` tokens after ``anchor``, which follows the positions taken in so far."""
        ...


class PlainProposer:
    """Proposes nothing: every round commits the target's one token."""

    gamma = 0
    layer_ids: tuple[int, ...] = ()

    def start(self, max_length: int) -> None:  # noqa: ARG002 - the protocol's signature
        """Do nothing."""

    def extend(self, committed: Committed) -> None:
        """Do nothing."""

    def propose(self, anchor: int, num_tokens: int, sampler: Sampler) -> Proposal | None:  # noqa: ARG002
        """Return None."""
        return None


class PromptLookupProposer:
    """Repeats what followed the latest occurrence of the text's last tokens (Saxena 2023).

    The longest n-gram that occurs again is taken, ``max_ngram`` tokens at most. The proposal is certain, so its
    distributions are one-hot, and the acceptance rule keeps a token with the target's own probability.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, gamma: int = 5, max_ngram: int = 3) -> None:
        self.gamma = gamma
        self._vocab_size = vocab_size
        self._max_ngram = max_ngram
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def start(self, max_length: int) -> None:  # noqa: ARG002 - the protocol's signature
        """Forget the last sequence."""
        self._text = []
        self._ends = {}

    def extend(self, committed: Committed) -> None:
        """Take in the tokens, and note where the n-grams that end in them go on."""
        for token in committed.tokens:
            self._text.append(token)
            for size in range(1, min(self._max_ngram, len(self._text)) + 1):
                self._ends[tuple(self._text[-size:])] = len(self._text)

    def propose(self, anchor: int, num_tokens: int, sampler: Sampler) -> Proposal | None:
        """Return what followed the latest longest match, or None without a match."""
        tail = [*self._text[-(self._max_ngram - 1) :], anchor] if self._max_ngram > 1 else [anchor]
        for size in range(len(tail), 0, -1):
            end = self._ends.get(tuple(tail[-size:]))
            if end is not None:
                # A match at the very end of the text goes on with the anchor itself.
                found = [*self._text[end : end + num_tokens], anchor][:num_tokens]
                return self._certain(found, sampler.generator.device) if found else None
        return None

    def _certain(self, found: list[int], device: torch.device) -> Proposal:
        tokens = torch.tensor(found, device=device)
        probabilities = torch.zeros(len(found), self._vocab_size, device=device)
        return Proposal(tokens=tokens, probabilities=probabilities.scatter_(-1, tokens.unsqueeze(-1), 1.0))


class DrafterProposer:
    """Lets a trained drafter propose.

    With a ``confidence_threshold`` a block ends before the first slot that is less likely to be kept: the product of
    the confidences up to it (DSpark's survival probability, section 3.2). Where the drafter was calibrated, each slot's
    log-odds are divided by the slot's temperature first. The confidence of a slot is known before its
    token is drawn (it depends on the features and on earlier tokens only), so that stopping there leaves the output's
    distribution as it is; stopping by anything that depends on the token itself would not.
    """

    def __init__(self, drafter: Drafter, confidence_threshold: float | None = None) -> None:
        self.gamma = drafter.conventions.gamma
        self.layer_ids = drafter.taps
        self._drafter = drafter
        self._threshold = confidence_threshold
        self._temperatures = drafter.confidence_temperatures
        self._state: Any = None

    def start(self, max_length: int) -> None:
        """Begin a new sequence."""
        self._state = self._drafter.start(max_length)

    def extend(self, committed: Committed) -> None:
        """Hand the next committed positions to the drafter."""
        self._drafter.extend(self._state, committed)

    def propose(self, anchor: int, num_tokens: int, sampler: Sampler) -> Proposal | None:
        """Draft a block, and end it early where the drafter is not confident."""
        proposal = self._drafter.propose(self._state, anchor, num_tokens, sampler)
        if self._threshold is None:
            return proposal
        if proposal.confidence_logits is None:
            raise UserError(
                f"confidence_threshold is {self._threshold}, but this drafter has no confidence head; leave it out"
            )
        survival = survival_chances(proposal.confidence_logits, self._temperatures)
        sure = int((survival >= self._threshold).sum())  # the products fall
        return Proposal(proposal.tokens[:sure], proposal.probabilities[:sure], proposal.confidence_logits[:sure])


def survival_chances(logits: Tensor, temperatures: Sequence[float] | None = None) -> Tensor:
    """Return the chances [..., k] that all slots up to each one are kept, from the log-odds [..., k] of each.

    ``temperatures`` are those of a block's slots, at least k of them; None leaves the log-odds as they are.
    """
    if temperatures is not None:
        logits = logits / logits.new_tensor(temperatures[: logits.shape[-1]])
    return logits.sigmoid().cumprod(dim=-1)
