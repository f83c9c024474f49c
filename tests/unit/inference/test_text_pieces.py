"""Text that arrives a few tokens at a time: whole characters, nothing twice, and all of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepspec.inference.text_pieces import UNFINISHED, TextPieces

TEXTS = [
    "plain words, and more",
    " a leading space",
    "naïve café – “quoted”",
    "日本語のテキスト",
    "👩‍👩‍👧 families and 🇫🇷 flags",
    "tabs\tand\n\nlines  \n",
    "e\u0301 combining",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE without merges: one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={"<end>": 0, **{c: n + 1 for n, c in enumerate(alphabet)}}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters like SentencePiece's: spaces as ▁, the first dropped, bytes for all else."""
    pieces = ["<end>", *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,.\n\t"]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback}


def in_pieces(tokenizer: Any, tokens: list[int], most: int, seed: int) -> list[str]:
    pieces, cut, text = TextPieces(tokenizer), random.Random(seed), list[str]()
    while tokens:
        size = cut.randint(1, most)
        text.append(pieces.push(tokens[:size]))
        tokens = tokens[size:]
    return [*text, pieces.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("most", [1, 3, 7])
def test_pieces_are_the_text_in_whole_characters(kind: str, most: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    for seed, text in enumerate(TEXTS):
        tokens = tokenizer(text)["input_ids"]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        found = in_pieces(tokenizer, tokens, most, seed)
        assert "".join(found) == whole
        assert whole.strip() == text.strip()
        assert not any(UNFINISHED in piece for piece in found)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_character_is_held_back_until_it_is_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = tokenizer("ab")["input_ids"] + tokenizer("€")["input_ids"][-3:]
    pieces = TextPieces(tokenizer)
    assert [pieces.push([token]) for token in tokens][-5:] == ["a", "b", "", "", "€"]
    assert pieces.finish() == ""


def test_a_character_that_never_becomes_whole_comes_at_the_end() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("ab€")["input_ids"][:-1]
    found = in_pieces(tokenizer, tokens, 1, 0)
    assert "".join(found) == tokenizer.decode(tokens)
    assert found[-1] == UNFINISHED


def test_special_tokens_leave_no_trace_and_no_lost_space() -> None:
    tokenizer = byte_fallback()
    first, second = tokenizer("ab")["input_ids"], tokenizer("x cd")["input_ids"][2:]
    tokens = [*first, 0, *second, 0]
    assert "".join(in_pieces(tokenizer, tokens, 1, 0)) == tokenizer.decode(tokens, skip_special_tokens=True) == "ab cd"
    assert in_pieces(tokenizer, [0], 1, 0) == ["", ""]


def test_nothing_is_decoded_from_the_beginning_again() -> None:
    """The time of a long answer grows with its length, not with the square of it."""
    lengths = list[int]()

    class Counting:
        def decode(self, tokens: list[int], **_options: object) -> str:
            lengths.append(len(tokens))
            return "x" * len(tokens)

    pieces = TextPieces(Counting())
    assert "".join(pieces.push([1, 2]) for _ in range(100)) == "x" * 200
    assert max(lengths) == 4
