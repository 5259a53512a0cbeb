"""Untrusted text cannot control the terminal, and stays readable."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.runs.console import Console
from assay.terminal import PrintableStream, one_line, printable

UNSAFE = [*map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)))]


@pytest.mark.parametrize(
    "text",
    [
        "plain text\n\twith a tab",
        "family emoji 👨‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿, heart ❤️",
        "שלום עולם",
        "مرحبا\u200f (RLM) \u061c",
        "naïve — 你好 ａ",
    ],
)
def test_text_of_any_language_is_unchanged(text: str) -> None:
    assert printable(text) == text


@given(st.text(alphabet=st.one_of(st.sampled_from(UNSAFE), st.characters(codec="utf-8"))))
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & set(UNSAFE)
    assert "\n" not in one_line(text) and not set(one_line(text)) & set(UNSAFE)
    assert printable(shown) == shown


def test_control_characters_become_visible() -> None:
    assert printable("\x1b[31mred\x07 a\r\nb\rc") == "␛[31mred␇ a\nb␍c"
    assert printable("file\u202egnp.exe") == "file\\u202egnp.exe"


def test_long_lines_keep_their_beginning_and_end() -> None:
    line = one_line("start " + "x" * 5000 + " end", 100)
    assert len(line) < 120 and line.startswith("start") and line.endswith("end")


def test_printable_stream_filters_text() -> None:
    inner = io.StringIO()
    print("a\x1b[2Jb", file=PrintableStream(inner))
    assert inner.getvalue() == "a␛[2Jb\n" and not PrintableStream(inner).isatty()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_notes_warnings_tables_and_progress_of_a_run_are_printable(kind: type[io.StringIO]) -> None:
    file, evil = kind(), "\x1b]0;title\x07\u202e"
    console = Console(file)
    console.note(f"note {evil}")
    console.warn(f"warning {evil}")
    console.table(f"title {evil}", ["a", evil], [[evil, "two\nlines"]])
    console.start(3, f"name{evil}")
    console.stop()
    assert "\x1b]0" not in file.getvalue() and "\x07" not in file.getvalue() and "\u202e" not in file.getvalue()
    assert "two lines" in file.getvalue()
