"""Untrusted text (data, model output, file names) without control sequences of the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

# Control characters become visible symbols, e.g. U+241B for escape; newlines and tabs are kept.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0x2421)
# Bidirectional embeddings, overrides and isolates can reorder the text around them, and right-to-left text does not
# need them. The marks U+200E, U+200F and U+061C, and the joiners of emoji, are kept.
_VISIBLE |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_UNSAFE = re.compile(f"[{re.escape(''.join(map(chr, _VISIBLE)))}]")


def printable(text: str) -> str:
    """Make control characters and bidirectional controls visible. Newlines and tabs are kept."""
    return text.replace("\r\n", "\n").translate(_VISIBLE) if _UNSAFE.search(text) else text


def one_line(text: str, limit: int = 0) -> str:
    """The printable text on one line; with a limit, the middle of a longer text is replaced by dots."""
    line = printable(" ".join(text.split()))
    return f"{line[: limit // 2]} ... {line[-limit // 2 :]}" if 0 < limit < len(line) else line


class PrintableStream:
    """A text stream that makes its text printable. Libraries that write terminal codes need the inner `stream`."""

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
    """The unfiltered stream, for libraries that write terminal codes."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


@contextmanager
def printable_output() -> Iterator[None]:
    """Filter stdout and stderr through `printable` within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(Any, stream and PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
