"""Decode prompts and keep what the confidence head said in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepspec.errors import UserError
from deepspec.evaluation.acceptance import Decoded
from deepspec.evaluation.calibration import ConfidenceRounds
from deepspec.inference.decoder import SpeculativeDecoder
from deepspec.inference.proposers import DrafterProposer
from deepspec.log import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from deepspec.contracts import Committed, Proposal
    from deepspec.drafters.base import Drafter
    from deepspec.evaluation.acceptance import Prompt
    from deepspec.inference.decoder import DecodingTarget, Round
    from deepspec.inference.sampling import Sampler, SamplerSettings


class ListeningProposer:
    """Lets a drafter propose whole blocks, and notes the log-odds of each."""

    def __init__(self, drafter: Drafter) -> None:
        proposer = DrafterProposer(drafter)
        self.gamma, self.layer_ids = proposer.gamma, proposer.layer_ids
        self.heard: list[list[float]] = []
        """Of each block since ``start`` that holds a token, slot by slot."""
        self._proposer = proposer

    def start(self, max_length: int) -> None:
        """Begin a new sequence, and forget what was heard."""
        self.heard = []
        self._proposer.start(max_length)

    def extend(self, committed: Committed) -> None:
        """Hand the next committed positions on."""
        self._proposer.extend(committed)

    def propose(self, anchor: int, num_tokens: int, sampler: Sampler) -> Proposal | None:
        """Draft a whole block.

        Raises:
            UserError: the drafter has no confidence head.
        """
        proposal = self._proposer.propose(anchor, num_tokens, sampler)
        if proposal is None or proposal.confidence_logits is None:
            raise UserError("this drafter has no confidence head: set export.calibration_prompts=0")
        self.heard.append(proposal.confidence_logits.tolist())
        return proposal


def decode_listening(
    target: DecodingTarget,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    settings: Callable[[int], SamplerSettings],
    stop_ids: Collection[int],
) -> tuple[list[Decoded], ConfidenceRounds]:
    """Decode every prompt with whole blocks; return the texts, and what the confidence head said in their rounds.

    ``settings`` are asked for by the prompt's index, so that each has its own seed.
    """
    proposer = ListeningProposer(drafter)
    decoder, decoded = SpeculativeDecoder(target, proposer), list[Decoded]()
    rows: list[tuple[Round, list[float]]] = []
    for index, prompt in enumerate(progress(prompts, len(prompts), "decoding for the calibration")):
        proposer.heard = []  # a text of one token does not start the proposer
        generation = decoder.generate(prompt.ids, max_new_tokens, settings(index), stop_ids)
        decoded.append(Decoded(prompt, generation))
        rows += zip([r for r in generation.rounds if r.drafted], proposer.heard, strict=True)
    return decoded, confidence_rounds(rows, drafter.conventions.gamma)


def confidence_rounds(rows: Sequence[tuple[Round, Sequence[float]]], gamma: int) -> ConfidenceRounds:
    """Return rounds and their log-odds as tensors [n, K]."""
    logits = [[*heard, *[0.0] * (gamma - len(heard))] for _, heard in rows]
    kept = [[j < item.accepted for j in range(gamma)] for item, _ in rows]
    judged = [list(_judged(item, gamma)) for item, _ in rows]
    shape = (len(rows), gamma)
    return ConfidenceRounds(
        torch.tensor(logits, dtype=torch.float32).view(shape),
        torch.tensor(kept, dtype=torch.bool).view(shape),
        torch.tensor(judged, dtype=torch.bool).view(shape),
    )


def _judged(item: Round, gamma: int) -> Iterator[bool]:
    """Say of each slot whether the round shows that everything up to it was kept, or was not.

    A censored round shows what was kept before the text ended. Any other shows all slots it drafted: behind a refused
    one, nothing was kept.
    """
    known = item.accepted if item.censored else item.drafted
    return (j < known for j in range(gamma))
