"""Stop strings: looked for in the decoded tail of what was written so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
MARGIN = 4  # tokens before the tail, since decoding may treat the first ones differently (spaces, parts of a character)


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
