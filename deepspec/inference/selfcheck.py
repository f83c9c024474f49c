"""``selfcheck.json``: a few prompts with the tokens that the packaged drafter proposed for their first block.

A package can load without a fault and still draft nonsense: features of other layers, a kernel that is wrong on this
machine, a target whose name and fingerprint lie. A few tokens, drafted anew behind the same prompts, show it.

The rule. Each slot is asked after the stored tokens before it, so that one different choice does not spread. Where the
likeliest token is another than the stored one, that is a fault if the stored margin was clear: if the likeliest token
led the second one by more of the standard deviation of the slot's logits than the coarsest precision at hand explains
(``CLEAR``). Rounding moves every logit by about a random share of that deviation, whatever the target's scale or
soft-cap. Measured on the quickstart's target and drafter, exported in fp32, 120 slots: bf16 turned seven choices, whose
margins were 0.052 at most, and fp16 none. The limit of bf16 is five times that, and those of the finer types are lower.
96 % of those slots have a margin that is clear in fp32. A slot with a smaller one may turn out either way, and is not
judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from deepspec.contracts import Committed
from deepspec.errors import PackageError
from deepspec.inference.package_config import SELFCHECK
from deepspec.inference.strict_json import build, read_json
from deepspec.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from deepspec.drafters.base import Drafter
    from deepspec.inference.decoder import DecodingTarget
    from deepspec.inference.package_config import PackageConfig

log = get_logger(__name__)

MAX_TOKENS = 64
"""Of a stored prompt, its anchor included."""
MAX_PROMPTS = 16
CLEAR = {torch.float32: 0.02, torch.float16: 0.05, torch.bfloat16: 0.25}
"""Margins, in standard deviations of a slot's logits, beyond which rounding in that precision changes no choice."""

COARSE = CLEAR[torch.bfloat16]  # of anything else


@dataclass(frozen=True)
class CheckedPrompt:
    """One stored prompt."""

    ids: tuple[int, ...]  # the last one is the anchor; the target reads those before it
    tokens: tuple[int, ...]  # gamma, what the drafter proposes greedily
    margins: tuple[float, ...]  # gamma, by how much each led the second one, in deviations of the logits


@dataclass(frozen=True)
class SelfCheck:
    """The contents of ``selfcheck.json``."""

    version: Literal[1]
    prompts: tuple[CheckedPrompt, ...]


def read_selfcheck(folder: Path, config: PackageConfig) -> SelfCheck | None:
    """Read and check the file that ``config`` names; None where it names none.

    Raises:
        PackageError: naming the key.
    """
    if config.selfcheck is None:
        return None
    found = build(SelfCheck, read_json(folder, SELFCHECK), SELFCHECK)
    problems = list(_problems(found, config))
    if problems:
        raise PackageError("\n".join(f"{SELFCHECK}: {problem}" for problem in problems))
    return found


@torch.inference_mode()
def make_selfcheck(drafter: Drafter, target: DecodingTarget, prompts: Sequence[Sequence[int]]) -> SelfCheck:
    """Draft one block behind each of ``prompts``: their last tokens, and the target's own next one as the anchor."""
    made = []
    for prompt in prompts:
        read = list(prompt[-(MAX_TOKENS - 1) :])
        said = target.step(torch.tensor([read], device=target.device), target.new_cache(len(read)), (), num_logits=1)
        ids = (*read, int(said.logits[-1].argmax()))
        slots = _draft(drafter, target, ids)
        made.append(CheckedPrompt(ids, tuple(s.token for s in slots), tuple(s.margin for s in slots)))
    return SelfCheck(1, tuple(made))


@torch.inference_mode()
def run_selfcheck(stored: SelfCheck, drafter: Drafter, target: DecodingTarget) -> int:
    """Draft the stored blocks again; return how many slots had a clear margin and agreed.

    Raises:
        PackageError: naming the first prompt and slot that differ by more than rounding explains.
    """
    limit, agreed = clear_margin(drafter), 0
    for number, prompt in enumerate(stored.prompts):
        slots = _draft(drafter, target, prompt.ids, prompt.tokens)
        for j, (slot, token, margin) in enumerate(zip(slots, prompt.tokens, prompt.margins, strict=True)):
            if margin <= limit:
                continue
            if slot.token != token:
                raise PackageError(
                    f"{SELFCHECK}: prompt {number}, slot {j}: the drafter proposes token {slot.token}, the package "
                    f"says {token}, which led by {margin:.3g} standard deviations of the logits; rounding explains "
                    f"{limit:g} here. Target, package or a kernel of this machine is not what it was at export"
                )
            agreed += 1
    log.info("self-check: %d slots agree", agreed)
    return agreed


def clear_margin(drafter: Drafter) -> float:
    """Return the margin beyond which the precision of drafter and target head, the coarser one, changes no choice."""
    dtypes = {drafter.head.weight.dtype, *(p.dtype for p in drafter.parameters())}
    return max(CLEAR.get(dtype, COARSE) for dtype in dtypes)


@dataclass(frozen=True)
class _Slot:
    token: int
    margin: float


class _Watch:
    """A token sampler that notes the likeliest token of each slot, and goes on with the stored one where it is told."""

    def __init__(self, told: Sequence[int] | None) -> None:
        self.slots: list[_Slot] = []
        self._told = told

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = logits.float()
        best, places = scores.topk(2)
        place = places[0] if ids is None else ids[places[0]]
        spread = float(scores.std())
        self.slots.append(_Slot(int(place), float(best[0] - best[1]) / spread if spread > 0 else 0.0))
        if self._told is not None:
            place = torch.tensor(self._told[len(self.slots) - 1], device=logits.device)
        return place, scores.softmax(-1)


def _draft(
    drafter: Drafter, target: DecodingTarget, ids: Sequence[int], told: Sequence[int] | None = None
) -> list[_Slot]:
    """Draft a block after the last of ``ids``, as the decoder does after a prefill."""
    gamma, read = drafter.conventions.gamma, list(ids[:-1])
    length = len(ids) + gamma
    said = target.step(torch.tensor([read], device=target.device), target.new_cache(length), drafter.taps, num_logits=1)
    state = drafter.start(length)
    drafter.extend(state, Committed(read, said.hidden, said.last_hidden))
    watch = _Watch(told)
    drafter.propose(state, ids[-1], gamma, watch)
    return watch.slots


def _problems(found: SelfCheck, config: PackageConfig) -> Iterator[str]:
    if not 1 <= len(found.prompts) <= MAX_PROMPTS:
        yield f"prompts holds {len(found.prompts)}, it must be 1 .. {MAX_PROMPTS}"
    for n, prompt in enumerate(found.prompts[:MAX_PROMPTS]):
        if not 2 <= len(prompt.ids) <= MAX_TOKENS:  # noqa: PLR2004 - one is read, one is the anchor
            yield f"prompts[{n}].ids has {len(prompt.ids)} tokens, it must be 2 .. {MAX_TOKENS}"
        for name in ("tokens", "margins"):
            if len(getattr(prompt, name)) != config.gamma:
                yield f"prompts[{n}].{name} has {len(getattr(prompt, name))} entries, gamma={config.gamma}"
        for name in ("ids", "tokens"):
            strange = [t for t in getattr(prompt, name) if not 0 <= t < config.vocab_size]
            yield from (f"prompts[{n}].{name} holds {t}, not in 0 .. {config.vocab_size - 1}" for t in strange)
        yield from (f"prompts[{n}].margins holds {m}, below 0" for m in prompt.margins if m < 0)
