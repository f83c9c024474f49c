"""From a conversation to tokens and the loss mask, by the tokenizer's own chat template.

The mask is True on the tokens that the target itself would generate, and nothing about a template is known by name:

* what the target saw before an answer is the rendering of the messages before it, with the generation prompt;
* the last answer is tokenised on its own behind that prompt, as generation does, so neither the template's text nor an
  injected empty think block is ever among its tokens;
* the end-of-turn token is what the template writes behind an answer, if it is one of the ids that end generation.
  It is there only when the target said it: not after an answer that was cut by length;
* an earlier answer lies inside the last prompt. It is supervised when its own prompt still stands there unchanged and
  its text follows; a template that rewrites history (think blocks stripped) fails this for some.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateError

from deepspec.contracts import Conversation, Sample
from deepspec.data.conversations import as_dicts
from deepspec.errors import DataError

Messages = Sequence[tuple[str, str]]

_RECUT = 8  # tokens looked at where a longer text is cut into other tokens
_PLACEHOLDER = "xAnswerPlaceholderx"
NO_ANSWER = "no answer"
TOO_SHORT = "fewer than two supervised tokens in a row"
CUT_AWAY = "nothing supervised left within data.max_length"


@dataclass(frozen=True)
class Dropped:
    """A conversation that gives no sample, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Rendering:
    """What became of one conversation, and how many of its answers the template had rewritten."""

    result: Sample | Dropped
    rewritten_turns: int = 0


class _Turn(NamedTuple):
    """An earlier answer inside the last prompt: the text before it, and the text up to its end."""

    before: str
    upto: str


@dataclass
class _Draft:
    """A conversation on its way: texts first, then tokens for all texts at once."""

    conversation: Conversation
    prompt: str = ""
    answer: str = ""
    suffix: str = ""
    turns: list[_Turn] = field(default_factory=list)
    rewritten: int = 0
    dropped: str = ""

    def texts(self) -> list[str]:
        """Return every text that has to be tokenised, in the order in which ``_assemble`` takes them."""
        return [self.prompt, self.answer, self.suffix.lstrip(), *(text for turn in self.turns for text in turn)]


class ChatRenderer:
    """Renders conversations with one tokenizer and one set of template options."""

    def __init__(
        self,
        tokenizer: Any,
        template_options: Mapping[str, Any] | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        max_length: int | None = None,
    ) -> None:
        """Take the tokenizer of a target.

        Args:
            tokenizer: a Hugging Face tokenizer with a chat template.
            template_options: extra variables for the template (``conf/target`` holds them).
            eos_token_ids: the ids that end generation; the tokenizer's own end-of-sequence id is always one of them.
            max_length: longest sample in tokens; longer ones are cut on the right.

        Raises:
            DataError: the tokenizer has no chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the target'} has no chat template, so "
                "conversations cannot be rendered; set target.path to a chat model, or put a chat_template.jinja "
                "beside its tokenizer"
            )
        own = tokenizer.eos_token_id
        self.tokenizer = tokenizer
        self.template_options = dict(template_options or {})
        self.max_length = max_length
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if own is None else frozenset((own,)))

    def prompt_text(self, messages: Messages) -> str:
        """Return the text that the target continues when it answers ``messages``."""
        return self._template(messages, generation_prompt=True)

    def prompt_ids(self, messages: Messages) -> list[int]:
        """Return the tokens of ``prompt_text``."""
        return self._encode([self.prompt_text(messages)])[0]

    def end_of_turn(self, messages: Messages) -> int | None:
        """Return the token that ends an answer to ``messages``; None if the template writes none."""
        ids = self._encode([self._suffix(messages).lstrip()])[0]
        return ids[0] if ids and ids[0] in self.eos_token_ids else None

    def render(self, conversation: Conversation) -> Sample | Dropped:
        """Tokenise one conversation up to its last answer."""
        return self.render_many([conversation])[0].result

    def render_many(self, conversations: Sequence[Conversation]) -> list[Rendering]:
        """Tokenise conversations together, which a fast tokenizer does on all cores; the order is kept."""
        drafts = [self._draft(conversation) for conversation in conversations]
        texts = {text: None for draft in drafts if not draft.dropped for text in draft.texts()}
        ids = dict(zip(texts, self._encode(list(texts)), strict=True))
        return [self._assemble(draft, ids) for draft in drafts]

    def _draft(self, conversation: Conversation) -> _Draft:
        draft = _Draft(conversation)
        answers = [i for i, (role, _) in enumerate(conversation.messages) if role == "assistant" and i > 0]
        if not answers:
            draft.dropped = NO_ANSWER
            return draft
        last = answers[-1]
        try:
            draft.prompt = self.prompt_text(conversation.messages[:last])
            draft.suffix = self._suffix(conversation.messages[:last])
            draft.answer = conversation.messages[last][1]
            for i in answers[:-1]:
                self._add_turn(draft, self.prompt_text(conversation.messages[:i]), conversation.messages[i][1])
        except (TemplateError, TypeError, ValueError) as error:
            draft.dropped = f"the chat template refuses it: {error}"
        return draft

    def _add_turn(self, draft: _Draft, before: str, content: str) -> None:
        """Find an earlier answer in the last prompt; a template may trim it or put white space before it."""
        upto = _end_of_answer(draft.prompt, before, content)
        if upto is None:
            draft.rewritten += 1
        else:
            draft.turns.append(_Turn(before, draft.prompt[:upto]))

    def _assemble(self, draft: _Draft, ids: Mapping[str, list[int]]) -> Rendering:
        conversation = draft.conversation
        if draft.dropped:
            return Rendering(Dropped(conversation.id, draft.dropped))
        prompt, answer = ids[draft.prompt], ids[draft.answer]
        spans = [span for turn in draft.turns if (span := self._span(prompt, ids[turn.before], ids[turn.upto]))]
        rewritten = draft.rewritten + len(draft.turns) - len(spans)
        tokens = [*prompt, *answer, *self._final(conversation, ids[draft.suffix.lstrip()])]
        mask = [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        for start, end in spans:
            mask[start:end] = [True] * (end - start)
        return Rendering(self._finish(conversation, tokens, mask), rewritten)

    def _span(self, prompt: list[int], before: list[int], upto: list[int]) -> tuple[int, int] | None:
        """Return the supervised [start, end) of an earlier answer, None if its tokens do not stand in the prompt."""
        start, end = self._boundary(prompt, before, up=True), self._boundary(prompt, upto, up=False)
        if start is None or end is None or start >= end:
            return None
        return start, end + (end < len(prompt) and prompt[end] in self.eos_token_ids)

    def _boundary(self, prompt: list[int], head: list[int], *, up: bool) -> int | None:
        """Return how many tokens of ``prompt`` make up ``head``; a token that straddles its end is in with ``up``.

        The longer text may be cut differently there: two newlines are one token or two, a space joins the next word.
        """
        same = len(commonprefix([prompt, head]))
        if same == len(head):
            return same
        tail = self.tokenizer.decode(head[same:])
        sizes = range(same, min(len(prompt), same + _RECUT) + 1)
        texts = {size: self.tokenizer.decode(prompt[same:size]) for size in sizes}
        if up:
            return next((size for size, text in texts.items() if text.startswith(tail)), None)
        return next((size for size, text in reversed(texts.items()) if tail.startswith(text)), None)

    def _final(self, conversation: Conversation, suffix: list[int]) -> list[int]:
        """Return the end-of-turn that the target itself put behind the last answer: one token or none."""
        cut = conversation.finish_reason == "length"
        return suffix[:1] if suffix and suffix[0] in self.eos_token_ids and not cut else []

    def _finish(self, conversation: Conversation, tokens: list[int], mask: list[bool]) -> Sample | Dropped:
        size = min(len(tokens), self.max_length or len(tokens))
        if not _has_pair(mask):
            return Dropped(conversation.id, TOO_SHORT)
        if not _has_pair(mask[:size]):
            return Dropped(conversation.id, CUT_AWAY)
        return Sample(conversation.id, tuple(tokens[:size]), tuple(mask[:size]), conversation.source)

    def _suffix(self, messages: Messages) -> str:
        """Return what the template writes behind an answer to ``messages``."""
        text = self._template([*messages, ("assistant", _PLACEHOLDER)], generation_prompt=False)
        return text.rpartition(_PLACEHOLDER)[2]

    def _template(self, messages: Messages, *, generation_prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            as_dicts(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.template_options
        )
        return text

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenise texts; special tokens written in them count, none are added."""
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def _end_of_answer(prompt: str, before: str, content: str) -> int | None:
    """Return where the answer ``content`` behind ``before`` ends in ``prompt``, None if it is not there."""
    if not prompt.startswith(before):
        return None
    start = len(before)
    if prompt.startswith(content, start):
        return start + len(content)
    trimmed = content.strip()
    found = prompt.find(trimmed, start)
    if found < 0 or prompt[start:found].strip():
        return None
    return found + len(trimmed)


def _has_pair(mask: Sequence[bool]) -> bool:
    return any(a and b for a, b in zip(mask, mask[1:], strict=False))
