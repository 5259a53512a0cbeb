"""Stop strings: looked for in the decoded tail of what was written so far, where the last token can complete one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import numpy as np

Decode = Callable[[Sequence[int]], str]
MARGIN = 4  # tokens before the tail, since decoding may treat the first ones differently (spaces, parts of a character)
BROKEN = "\ufffd"  # what a part of a character decodes to


class Kind(IntEnum):
    UNKNOWN, CANNOT, MAY = range(3)


class StopStrings:
    """Few tokens can complete a stop string, and only they are worth decoding: which, is learned as they are seen."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.kinds: dict[tuple[str, ...], np.ndarray] = {}  # by token

    def suspects(self, tokens: np.ndarray, stops: tuple[str, ...]) -> np.ndarray:
        """Which of these tokens can complete one of the stop strings, whatever stands before them."""
        kinds = self.kinds.get(stops, np.zeros(0, dtype=np.int8))
        if (size := int(tokens.max(initial=0)) + 1) > len(kinds):
            kinds = self.kinds[stops] = np.pad(kinds, (0, 2 * size - len(kinds)))
        found = kinds[tokens]
        if not found.all():
            for token in np.unique(tokens[found == Kind.UNKNOWN]).tolist():
                kinds[token] = Kind.MAY if may_complete(token, stops, self.decode) else Kind.CANNOT
            found = kinds[tokens]
        return found == Kind.MAY

    def completed(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        return completes_stop(token_ids, stops, self.decode)


def may_complete(token: int, stops: Sequence[str], decode: Decode) -> bool:
    """Whether one of the stop strings can end within what this token adds to a text."""
    before, text = decode([token]), decode([token, token])  # the second shows what it adds: the first may lose a space
    if BROKEN in text or not text.startswith(before):
        return True  # it depends on its neighbours
    added = text[len(before) :]
    heads = [added[:end] for end in range(1, len(added) + 1)]
    return any(stop.endswith(head) or head.endswith(stop) for stop in stops for head in heads)


def completes_stop(token_ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Whether the last token completes one of the stop strings."""
    longest = max(len(stop) for stop in stops)
    window = longest + MARGIN
    while True:
        text = decode(token_ids[-window:])
        # Tokens that decode to nothing can make a tail too short to hold the string and what the last token added.
        added = len(text) - len(decode(token_ids[-window:-1]))
        if window >= len(token_ids) or len(text) >= longest + max(added, 0) + MARGIN:
            return any(stop in text for stop in stops)
        window *= 2
