"""Console output of runs; untrusted text cannot control the terminal, and stays readable."""

from __future__ import annotations

import io
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.runs.console import Console, PrintableStream, aligned, duration, one_line, percent, printable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_show_metrics_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 2)  # two seconds a step
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    console = Console(out)
    console.start(240, "demo")
    console.step(1, {"reward/mean": 0.412, "length/mean": 31.4, "time/step": 0.612})
    console.step(2, {"reward/mean": 0.5, "eval/accuracy": 0.521})
    console.step(3, {"reward/mean": float("nan"), "length/mean": None})
    console.note("saved [step 3]")
    console.warn("odd")
    console.stop()
    assert out.getvalue().splitlines() == [
        "demo: 240 steps",
        "step 1/240  reward 0.41  len 31  0.61 s  eta 7m58s",
        "step 2/240  reward 0.50  eval 0.52  eta 7m56s",
        "step 3/240  eta 7m54s",
        "saved [step 3]",
        "warning: odd",
    ]


def test_eta_of_a_resumed_run_counts_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    console = Console(out)
    console.start(240, "demo", done=200)
    console.step(201, {})
    assert out.getvalue().splitlines() == ["demo: 40 steps, from step 200", "step 201/240  eta 6m30s"]


def test_a_run_with_more_steps_than_its_total() -> None:
    out = io.StringIO()
    Console(out).start(2, "demo", done=4)
    assert out.getvalue() == "demo: 0 steps, from step 4\n"


def test_remaining_time_of_a_resumed_run_without_start_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 10)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    console = Console(out)
    console.start(240, "demo")
    console.step(201, {})
    assert out.getvalue().splitlines()[-1] == "step 201/240  eta 6m30s"


def test_short_steps_are_not_all_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 100)
    out = io.StringIO()
    console = Console(out)
    console.start(101, "warm start")
    for step in range(1, 102):
        console.step(step, {"sft/loss": 1.25, **({"eval/accuracy": 0.5} if step == 60 else {})})
    shown = [line.split()[1] for line in out.getvalue().splitlines()[1:]]
    assert shown == ["1/101", "51/101", "60/101", "101/101"]
    assert "loss 1.250" in out.getvalue()


def test_steps_without_a_progress_display() -> None:
    out = io.StringIO()
    console = Console(out)
    console.step(0, {"before/accuracy": 0.5})
    console.start(10, "demo")
    console.stop()
    console.step(10, {"after/accuracy": 0.75})
    assert out.getvalue().splitlines() == [
        "step 0  accuracy before 0.50",
        "demo: 10 steps",
        "step 10  accuracy after 0.75",
    ]


def test_tables_are_aligned_in_plain_output() -> None:
    out = io.StringIO()
    Console(out).table("Results", ["", "accuracy"], [["before", "33.0%"], ["after", "67.0%"]])
    assert out.getvalue() == "Results\n        accuracy\nbefore  33.0%\nafter   67.0%\n"


def test_terminal_shows_progress_and_escapes_markup() -> None:
    out = Terminal()
    with Console(out) as console:
        console.start(10, "de[mo]")
        console.step(3, {"reward/mean": 0.25})
        console.note("a [bold]note[/bold]")
        console.warn("[x] careful")
        console.table("T", ["[a]"], [["[b]"]])
    text = out.getvalue()
    for wanted in ("de[mo]", "step 3/10", "reward 0.25", "[bold]note[/bold]", "[x] careful", "[a]", "[b]"):
        assert wanted in text, wanted


def test_quiet_shows_warnings_only() -> None:
    out = io.StringIO()
    console = Console(out, quiet=True)
    console.start(2, "demo")
    console.step(1, {})
    console.note("note")
    console.table("T", ["a"], [["b"]])
    console.warn("careful")
    console.stop()
    assert out.getvalue() == "warning: careful\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (130, "2m10s"), (11_100, "3h05m"), (-1, "0s")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_aligned() -> None:
    assert aligned([["a", "bb"], ["ccc", 1]]) == ["a    bb", "ccc  1"]


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


def test_a_percentage_is_never_rounded_to_0_or_100() -> None:
    assert [percent(value) for value in (0, 1, 0.5, 1 / 3)] == ["0.0 %", "100.0 %", "50.0 %", "33.3 %"]
    assert [percent(value) for value in (4999 / 5000, 1 / 5000, 0.9996)] == ["99.98 %", "0.02 %", "99.96 %"]
