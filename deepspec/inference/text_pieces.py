"""From tokens that arrive a few at a time to pieces of text that are never taken back.

A character may be spread over several tokens, and what a tokenizer makes of a token may depend on the one before it (a
space at the very beginning is dropped, bytes join into a character). So text is decoded together with the tokens of the
piece before it, and held back while it ends in the middle of a character.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers show for the bytes of a character that is not whole yet."""


class TextPieces:
    """Decodes one text as its tokens arrive; the pieces together are the text of all tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """Use a tokenizer of transformers; special tokens are left out."""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._begin = 0  # first token of the last piece
        self._told = 0  # tokens whose text was given

    def push(self, tokens: Sequence[int]) -> str:
        """Take in the next tokens and return the text that they make certain, "" while there is none."""
        self._tokens += tokens
        return self._piece(final=False)

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        return self._piece(final=True)

    def _piece(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._begin : self._told])
        text = self._decode(self._tokens[self._begin :])
        if not final and (text.endswith(UNFINISHED) or not text.startswith(before)):
            return ""
        piece = text[len(before) :]
        if piece:
            self._begin, self._told = self._told, len(self._tokens)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
