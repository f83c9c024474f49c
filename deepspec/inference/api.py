"""Decode with a package from Python; needs torch, transformers and safetensors.

    from deepspec.inference.api import load

    model = load("runs/quickstart/package-fp16_int8", "path/of/the/target")
    model.generate("What is a drafter?").text
    for piece in model.stream([{"role": "user", "content": "And who verifies it?"}], max_new_tokens=64):
        ...

The text is the target's own, only sooner: greedy by default, or drawn from its distribution at a temperature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspec.errors import UserError
from deepspec.inference.accelerate import accelerate
from deepspec.inference.decoder import Generation, SpeculativeDecoder
from deepspec.inference.open_target import chat_ids, choose_device, open_target, stop_ids
from deepspec.inference.package import load_package
from deepspec.inference.package_config import read_config
from deepspec.inference.proposers import DrafterProposer
from deepspec.inference.text_pieces import TextPieces

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from deepspec.inference.proposers import Proposer
    from deepspec.inference.sampling import SamplerSettings
    from deepspec.targets.target import Target

Message = Mapping[str, str]
"""``role`` and ``content``."""
Prompt = str | Sequence[Message]
"""What the user says, or a whole conversation."""


@dataclass(frozen=True)
class Answer:
    """A text, without special tokens, and how it came about."""

    text: str
    generation: Generation


class AnswerStream:
    """The pieces of a text as they are decoded; together they are the text. ``answer`` is there after the last one."""

    def __init__(self, rounds: Generator[list[int], None, Generation], tokenizer: Any) -> None:
        self._rounds = rounds
        self._pieces = TextPieces(tokenizer)
        self._given: list[str] = []
        self._generation: Generation | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self._generation is None:
            try:
                piece = self._pieces.push(next(self._rounds))
            except StopIteration as end:
                self._generation = end.value
                piece = self._pieces.finish()
            if piece:
                self._given.append(piece)
                return piece
        raise StopIteration

    @property
    def answer(self) -> Answer:
        """The whole text.

        Raises:
            UserError: pieces are still to come.
        """
        if self._generation is None:
            raise UserError("the answer is not complete: read the stream to its end first")
        return Answer("".join(self._given), self._generation)


class TextModel:
    """A target that answers, and a proposer that drafts for it."""

    def __init__(self, target: Target, proposer: Proposer, template_options: Mapping[str, Any] | None = None) -> None:
        """Join the two; ``template_options`` are variables of the target's chat template."""
        self.target = target
        self._decoder = SpeculativeDecoder(target, proposer)
        self._options = dict(template_options or {})
        self._stop_ids = stop_ids(target)
        self._texts = 0

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        settings: SamplerSettings | None = None,
        gamma: int | None = None,
        raw: bool = False,
    ) -> Answer:
        """Answer a prompt.

        Args:
            prompt: What the user says, or a conversation of messages with role and content.
            max_new_tokens: Longest answer.
            settings: Temperature, seed, top_k and top_p; greedy by default.
            gamma: Drafted tokens of a round, at most those that the drafter was trained for, which is the default.
            raw: Continue the prompt (a text) as it is, without the chat template.
        """
        self._texts += 1
        ids = self.prompt_ids(prompt, raw=raw)
        generation = self._decoder.generate(ids, max_new_tokens, settings, self._stop_ids, gamma)
        pieces = TextPieces(self.target.tokenizer)
        return Answer(pieces.push(generation.tokens) + pieces.finish(), generation)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        settings: SamplerSettings | None = None,
        gamma: int | None = None,
        raw: bool = False,
    ) -> AnswerStream:
        """Answer a prompt piece by piece, with the arguments of ``generate``.

        One text at a time: a stream that another text of this model interrupts raises UserError when it is read on.
        """
        self._texts += 1
        ids = self.prompt_ids(prompt, raw=raw)
        rounds = self._decoder.rounds(ids, max_new_tokens, settings, self._stop_ids, gamma)
        return AnswerStream(self._alone(rounds, self._texts), self.target.tokenizer)

    def prompt_ids(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the tokens of a prompt as they are handed to the target.

        Raises:
            TargetError: the target has no chat template, and ``raw`` is not set.
            UserError: the template refuses the prompt, or a conversation is to be continued raw.
        """
        if not raw:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return chat_ids(self.target, messages, self._options)
        if not isinstance(prompt, str):
            raise UserError("raw=True continues a text, and was given messages: leave one out")
        return list(self.target.tokenizer(prompt)["input_ids"])

    def _alone(
        self, rounds: Generator[list[int], None, Generation], text: int
    ) -> Generator[list[int], None, Generation]:
        """Pass ``rounds`` on while no other text was begun."""
        while True:
            if self._texts != text:
                raise UserError("another text was begun before this stream was read to its end")
            try:
                new = next(rounds)
            except StopIteration as end:
                generation: Generation = end.value
                return generation
            yield new


def load(
    package: str | Path,
    target: str | Path | Target,
    *,
    device: str = "auto",
    dtype: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    confidence_threshold: float | None = None,
    allow_other_target: bool = False,
    trusted_drafters: tuple[str, ...] = (),
    self_check: bool = True,
) -> TextModel:
    """Load a package and its target, ready to answer.

    Args:
        package: A folder that ``deepspec.export`` has written.
        target: A local folder, a hub id, or a target that is loaded already (it is then accelerated in place).
        device: auto, cpu or cuda, where the target is to be loaded.
        dtype: fp32, bf16 or fp16; None is fp32 on the CPU and the checkpoint's own elsewhere.
        template_options: Variables of the chat template, on top of those that the package was trained with.
        confidence_threshold: End blocks before the first slot that is less likely to be kept, calibrated where the
            package is.
        allow_other_target: Accept another revision of the target than the one trained with.
        trusted_drafters: Dotted paths of configuration classes outside DeepSpec that may be imported.
        self_check: Compare the first blocks of the package's stored prompts with what was proposed at export.

    Raises:
        PackageError: The package is damaged, or does not fit the target.
        TargetError: The target cannot be loaded.
    """
    options = {**read_config(Path(package)).template_options, **(template_options or {})}
    opened = open_target(target, choose_device(device), dtype) if isinstance(target, str | Path) else target
    drafter = load_package(
        package,
        opened,
        allow_other_target=allow_other_target,
        trusted_drafters=trusted_drafters,
        self_check=self_check,
    )
    accelerate(opened, drafter)
    return TextModel(opened, DrafterProposer(drafter, confidence_threshold), options)
