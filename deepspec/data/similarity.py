"""How close the test prompts are to the training prompts, and how repetitive texts are.

Two texts are compared by the Jaccard similarity of their sets of lower-cased words, estimated with MinHash. Sets of
single words are the strict choice: a template that only swaps its numbers or names stays similar.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepspec.errors import DataError

THRESHOLD = 0.7
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Pair:
    """A test text, the training text nearest to it, and their estimated similarity in [0, 1]."""

    test_id: str
    train_id: str
    similarity: float


@dataclass(frozen=True)
class SimilarityReport:
    """The nearest pair, and for every test text above the threshold its nearest training text."""

    highest: Pair | None
    above: tuple[Pair, ...]
    threshold: float = THRESHOLD

    def line(self) -> str:
        """Return the report for a person."""
        if self.highest is None:
            return "test/train similarity: nothing to compare"
        top = self.highest
        return (
            f"test/train similarity (MinHash over words): {len(self.above)} test prompts above {self.threshold:g}; "
            f"highest {top.similarity:.2f} ({top.test_id} and {top.train_id})"
        )


def compare_prompts(
    test: Mapping[str, str], train: Mapping[str, str], *, threshold: float = THRESHOLD, shingle: int = 1,
    permutations: int = 128,
) -> SimilarityReport:  # fmt: skip
    """Compare texts by id; ``shingle`` words in a row make one element of a text's set."""
    test_ids, train_ids = list(test), list(train)
    if not test_ids or not train_ids:
        return SimilarityReport(None, (), threshold)
    ours = _signatures([test[i] for i in test_ids], shingle, permutations)  # [test, permutations]
    theirs = _signatures([train[i] for i in train_ids], shingle, permutations)
    pairs = []
    for row, signature in enumerate(ours):
        similarity = (theirs == signature).mean(axis=1)
        best = int(similarity.argmax())
        pairs.append(Pair(test_ids[row], train_ids[best], float(similarity[best])))
    above = tuple(sorted((p for p in pairs if p.similarity > threshold), key=lambda p: -p.similarity))
    return SimilarityReport(max(pairs, key=lambda p: p.similarity), above, threshold)


def repeated_ngram_share(token_lists: Sequence[Sequence[Hashable]], n: int = 8) -> float:
    """Return the share of tokens that lie in a repeated n-gram.

    An n-gram is repeated when it occurs at least twice, in one list or in two, overlapping occurrences included; every
    occurrence counts, the first one too. A token is counted once however many repeated n-grams cover it.
    """
    counts = Counter(gram for tokens in token_lists for gram in _grams(tokens, n))
    total = sum(len(tokens) for tokens in token_lists)
    covered = 0
    for tokens in token_lists:
        end = 0  # tokens before ``end`` are counted already
        for start, gram in enumerate(_grams(tokens, n)):
            if counts[gram] > 1:
                covered += start + n - max(start, end)
                end = start + n
    return covered / total if total else 0.0


def _grams(tokens: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def _signatures(texts: Sequence[str], shingle: int, permutations: int) -> np.ndarray:
    """Return the MinHash signatures [texts, permutations]."""
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise DataError("comparing prompts needs datasketch: pip install 'deepspec[evaluate]'") from error
    sets = [[" ".join(gram).encode() for gram in _shingles(text, shingle)] for text in texts]
    return np.stack([m.hashvalues for m in MinHash.generator(sets, num_perm=permutations, seed=1)])


def _shingles(text: str, n: int) -> set[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}
