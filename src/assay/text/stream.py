"""Token ids to text while they are sampled: characters that take several tokens, and stop strings that begin in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # decoded from bytes that are not a whole character, or not yet
WINDOW = 16  # tokens that are decoded together; more only while a character is incomplete
CHARACTER = 4  # maximum number of tokens per character, which has at most 4 bytes in UTF-8

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Decodes tokens as they arrive. The cost per token does not depend on the length of the text.

    Only the latest tokens are decoded. They begin where the text of earlier tokens was complete, and include tokens
    whose text was returned already, because decoding may strip the space before the first token.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that was returned
        self._complete = 0  # tokens of the window up to which the text was complete before the latest `add`
        self._limit = WINDOW

    def add(self, tokens: Sequence[int]) -> str:
        """New text. The first tokens of a character yield nothing until it is complete."""
        self._window += tokens
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            new = self._advance(text.rstrip(REPLACEMENT))
            return new + self._split(text) if len(self._window) >= 2 * self._limit else new
        new = self._advance(text)
        if len(self._window) > self._limit and self._complete:
            del self._window[: self._complete]
            self._shown = self._decode(self._window)
            self._limit = WINDOW
        self._complete = len(self._window)
        return new

    def finish(self) -> str:
        """Text that was held back because a character was incomplete."""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        if not text.startswith(self._shown):  # an incomplete character can change how earlier bytes are decoded
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def _split(self, text: str) -> str:
        """Shorten a window of bytes that form no characters, where decoding its parts gives the same text."""
        for end in range(len(self._window) - 1, len(self._window) - 1 - CHARACTER, -1):
            first, rest = self._decode(self._window[:end]), self._decode(self._window[end:])
            if first + rest == text and first.startswith(self._shown):
                new = first[len(self._shown) :]
                del self._window[:end]
                self._shown, self._complete, self._limit = "", 0, WINDOW
                return new
        self._limit *= 2  # rare; a longer window is decoded before the next attempt
        return ""


class TextStream:
    """Turns token ids into pieces of text. Pieces are final: joined, they are the text of the answer.

    The text ends before the first stop string. Text that may be the beginning of a stop string is held back.
    `context`: earlier tokens of the same text, which are not returned.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._detokenizer = Detokenizer(decode)
        self._detokenizer.add(context[-WINDOW:])
        self._stops = stops
        self._held = ""
        self._stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        new = self._detokenizer.add(tokens)
        return self._before_stop(new) if self._stops else new

    def finish(self) -> str:
        """Text that was held back, because a stop string or character could have continued."""
        new = self._detokenizer.finish()
        if not self._stops:
            return new
        new, held = self._before_stop(new), self._held
        self._held = ""
        return new + held

    def _before_stop(self, new: str) -> str:
        if self._stopped:
            return ""
        text, self._held = self._held + new, ""
        end = first_stop(text, self._stops)
        if end is not None:
            self._stopped = True
            return text[:end]
        lengths = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        if held := max(lengths, default=0):
            text, self._held = text[:-held], text[-held:]
        return text


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string in the text begins; None if there is none."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    return text[: first_stop(text, stops)]
