"""A file of answered conversations that survives being stopped.

Answers finish out of order. They are appended to ``<file>.partial`` as they finish, so a resumed run knows by id what
is there already; at the end the file is written in the order of the prompts and renamed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from deepspec.data.conversations import parse_line, to_line, write_conversations
from deepspec.data.generate import answer_prompts
from deepspec.errors import DataError
from deepspec.log import get_logger, progress

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deepspec.config.schema import GenerateConfig
    from deepspec.contracts import Conversation
    from deepspec.data.chat import ChatRenderer
    from deepspec.data.generate import Answer
    from deepspec.targets.target import Target

log = get_logger(__name__)


@dataclass(frozen=True)
class AnswerReport:
    """What became of the prompts of one file."""

    answered: int
    cut_by_length: int
    retokenised_differently: int  # answers whose text the tokenizer cuts into other tokens than the target said

    def line(self) -> str:
        """Return the report in one line."""
        return (
            f"{self.answered} prompts answered, {self.cut_by_length} of the answers cut by length or repetition; the "
            f"text of {self.retokenised_differently} gives other tokens than the target said"
        )


def answer_file(
    target: Target, renderer: ChatRenderer, conversations: Sequence[Conversation], config: GenerateConfig, out: Path
) -> AnswerReport:
    """Let the target answer ``conversations`` and write them with their answers to ``out``.

    A run that was stopped goes on where it was; every conversation is answered exactly once.

    Raises:
        DataError: the unfinished file beside ``out`` was made by another target or with other settings.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    done, differing = _read_partial(partial, _settings(target, config))
    by_id = {conversation.id: conversation for conversation in conversations}
    missing = [(name, renderer.prompt_ids(item.messages)) for name, item in by_id.items() if name not in done]
    if done:
        log.info("%s: %d answers are there already, %d to go", out.name, len(done), len(missing))
    answers = answer_prompts(target, missing, config, renderer.eos_token_ids)
    with partial.open("a", encoding="utf-8") as file:
        for answer in progress(answers, len(missing), f"answers of {out.name}"):
            conversation, same = _answered(by_id[answer.id], answer, target.tokenizer)
            differing += not same
            file.write(to_line(conversation)[:-1] + f', "same_tokens": {json.dumps(same)}}}\n')
            file.flush()
            done[answer.id] = conversation
    write_conversations(out, [done[conversation.id] for conversation in conversations])
    partial.unlink()
    cut = sum(done[name].finish_reason == "length" for name in by_id)
    return AnswerReport(answered=len(by_id), cut_by_length=cut, retokenised_differently=differing)


def _answered(conversation: Conversation, answer: Answer, tokenizer: Any) -> tuple[Conversation, bool]:
    """Return the conversation with its answer, and whether the answer's text gives the same tokens again."""
    tokens, text = _decode(answer, tokenizer)
    again = tokenizer(text, add_special_tokens=False)["input_ids"]
    messages = (*conversation.messages, ("assistant", text))
    return replace(conversation, messages=messages, finish_reason=answer.finish_reason), again == tokens


def _decode(answer: Answer, tokenizer: Any) -> tuple[list[int], str]:
    """Return the tokens and the text of an answer; a cut inside a character takes the character's first bytes away."""
    tokens = list(answer.tokens)
    while True:
        text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if answer.finish_reason != "length" or not text.endswith("\ufffd"):
            return tokens, text
        tokens.pop()


def _settings(target: Target, config: GenerateConfig) -> dict[str, Any]:
    """Return what an answer depends on; the batch size is no part of it."""
    settings = {"target": target.info.fingerprint, **asdict(config)}
    del settings["batch_size"]
    return settings


def _read_partial(partial: Path, settings: dict[str, Any]) -> tuple[dict[str, Conversation], int]:
    """Return the finished conversations of an unfinished file, cutting off a torn last line; start it if missing.

    The lines before are never written again: a kill at any moment costs one answer at most.
    """
    content = partial.read_bytes() if partial.is_file() else b""
    size = content.rfind(b"\n") + 1
    if not size:  # nothing, or not even the first line is whole
        partial.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return {}, 0
    try:
        first, *lines = content[:size].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise DataError(f"{partial}: not UTF-8 text; delete it to start again") from error
    _check_settings(partial, first, settings)
    if size < len(content):
        os.truncate(partial, size)
    read = [parse_line(line, f"{partial}:{i}") for i, line in enumerate(lines, start=2)]
    return {item.id: item for item in read}, sum(not json.loads(line).get("same_tokens", True) for line in lines)


def _check_settings(partial: Path, line: str, settings: dict[str, Any]) -> None:
    try:
        found = json.loads(line)["settings"]
        changed = [key for key in {**settings, **found} if found.get(key) != settings.get(key)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{partial}:1: no settings of its answers; delete the file to start again") from error
    if found != settings:
        raise DataError(
            f"{partial} holds answers made with another {', '.join(changed)}; delete it to start again, or set "
            "generate.* and target.* back to go on"
        )
