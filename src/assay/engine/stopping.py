"""Stop strings: looked for in the decoded tail of what was written so far, where the last token can complete one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

Decode = Callable[[Sequence[int]], str]
MARGIN = 4  # tokens before the tail, since decoding may treat the first ones differently (spaces, parts of a character)
BROKEN = "\ufffd"  # what a part of a character decodes to
TABLES = 64  # sets of stop strings whose tokens are remembered: a byte for each token of the vocabulary


class TokenKind(IntEnum):
    UNKNOWN, CANNOT, MAY = range(3)


class StopStrings:
    """Few tokens can complete a stop string, and only they are worth decoding: which, is learned as they are seen."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.added: dict[int, tuple[str, ...]] = {}  # by each token, whatever is looked for
        self.kinds: dict[tuple[str, ...], np.ndarray] = {}  # by token
        self.word_end: int | None = None  # a token whose space may be written only when another token follows

    def suspects(self, tokens: np.ndarray, stops: tuple[str, ...]) -> np.ndarray:
        """Which of these tokens can complete one of the stop strings, whatever stands before them."""
        kinds = self.kinds.get(stops, np.zeros(0, dtype=np.int8))
        if (size := int(tokens.max(initial=0)) + 1) > len(kinds):
            kinds = self._grown(kinds, 2 * size, stops)
        found = kinds[tokens]
        if not found.all():
            unknown = np.unique(tokens[found == TokenKind.UNKNOWN]).tolist()
            if self.word_end is None and self._find_word_end(unknown):
                return self.suspects(tokens, stops)
            for token in unknown:
                kinds[token] = TokenKind.MAY if self._may_complete(token, stops) else TokenKind.CANNOT
            found = kinds[tokens]
        return found == TokenKind.MAY

    def _grown(self, kinds: np.ndarray, size: int, stops: tuple[str, ...]) -> np.ndarray:
        if stops not in self.kinds and len(self.kinds) == TABLES:
            del self.kinds[next(iter(self.kinds))]
        table = self.kinds[stops] = np.zeros(size, dtype=np.int8)
        table[: len(kinds)] = kinds
        return table

    def _may_complete(self, token: int, stops: Sequence[str]) -> bool:
        if token not in self.added:
            self.added[token] = added_by(token, self.decode, self.word_end)
        return may_complete(self.added[token], stops)

    def _find_word_end(self, tokens: Sequence[int]) -> bool:
        """Look for a token that may end words, in the manner of "word</w>"; what was learned before it is forgotten.

        It has been seen by the time that its space matters, because it was drawn before the token that shows it.
        """
        for token in (token for token in tokens if token not in self.added):
            first, both = self.decode([token]), self.decode([token, token])
            if both != first + first and both.startswith(first) and BROKEN not in both:
                self.word_end = token
                self.added.clear()
                self.kinds.clear()
                return True
        return False

    def completed(self, token_ids: Sequence[int] | np.ndarray, stops: Sequence[str]) -> bool:
        return completes_stop(token_ids, stops, self.decode)


def added_by(token: int, decode: Decode, word_end: int | None = None) -> tuple[str, ...]:
    """What a token can add to a text: as its first one, which may lose a space, after itself, and after `word_end`.

    `BROKEN` if that depends on its neighbours.
    """
    found = {decode([token])}
    for before in (token, token if word_end is None else word_end):
        alone, both = decode([before]), decode([before, token])
        if BROKEN in both or not both.startswith(alone):
            return (BROKEN,)
        found.add(both[len(alone) :])
    return tuple(found)


def may_complete(added: Sequence[str], stops: Sequence[str]) -> bool:
    """Whether one of the stop strings can end within what a token adds."""
    return BROKEN in added or any(ends_in(stop, text) for stop in stops for text in added)


def ends_in(stop: str, text: str) -> bool:
    """Whether the stop string can end within this text, having begun in it or before."""
    return stop in text or any(stop.endswith(text[:end]) for end in range(1, min(len(text), len(stop)) + 1))


def completes_stop(token_ids: Sequence[int] | np.ndarray, stops: Sequence[str], decode: Decode) -> bool:
    """Whether the last token completes one of the stop strings; none was there before it."""
    longest = max(len(stop) for stop in stops)
    window = longest + MARGIN
    while True:
        tail = np.asarray(token_ids[-window:]).tolist()  # of what may be long: nothing else is made a list of
        text = decode(tail)
        before = decode(tail[:-1]).rstrip(BROKEN)  # a character may have become whole
        start = len(before) + 1 - longest if text.startswith(before) else 0  # of the first that this token can complete
        # Tokens that decode to nothing can make a tail too short to hold the string and what the last token added. One
        # that begins within a character may be unreadable up to its end: bytes are decoded all together, or not at all.
        if window >= len(token_ids):
            return any(stop in text for stop in stops)
        if start >= MARGIN and not text.startswith(BROKEN):
            return any(stop in text[start:] for stop in stops)
        window *= 2
