"""Text from elsewhere (data, models, file names) as text that a terminal cannot mistake for commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

# Control characters become their visible pictures, e.g. U+241B for escape; newlines and tabs stay.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0x2421)
# Bidirectional embeddings, overrides and isolates change the order of the text around them. Text from right to left
# needs none of them; the marks U+200E, U+200F and U+061C, and the joiners of emoji, are left alone.
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_HARMFUL = re.compile(f"[{re.escape(''.join(map(chr, _VISIBLE)))}]")


def printable(text: str) -> str:
    """The text with control characters and bidirectional controls made visible. Newlines and tabs stay."""
    return text.replace("\r\n", "\n").translate(_VISIBLE) if _HARMFUL.search(text) else text


def one_line(text: str, limit: int = 0) -> str:
    """The same on one line; with a limit, the middle of a longer text is left out."""
    line = printable(" ".join(text.split()))
    return f"{line[: limit // 2]} ... {line[-limit // 2 :]}" if 0 < limit < len(line) else line


class PrintableStream:
    """A text stream through which only printable text gets. Who writes terminal codes needs the `stream` beneath."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def raw_stream(stream: Any) -> Any:
    """The stream beneath, for libraries that write terminal codes of their own."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


@contextmanager
def printable_output() -> Iterator[None]:
    """Whatever is printed in the meantime is printable."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(Any, stream and PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
