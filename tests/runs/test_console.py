"""Console output of runs; untrusted text cannot control the terminal, and stays readable."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import comes_true

from assay.runs.console import (
    INTERVAL,
    Console,
    Operation,
    PrintableStream,
    count,
    duration,
    fraction,
    one_line,
    percent,
    printable,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(out: io.StringIO, text: str) -> str:
    """The output, as soon as the live display, which is refreshed by a thread, has shown the text."""
    comes_true(lambda: text in out.getvalue(), 10)
    return out.getvalue()


class Clock:
    """Seconds that advance only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Console, io.StringIO, Clock]:
    """A console that is not a terminal."""
    out, clock = io.StringIO(), Clock()
    return Console(out, clock=clock), out, clock


def test_plain_lines_show_metrics_and_remaining_time() -> None:
    console, out, clock = plain()
    console.start(240, "demo")
    first = {"reward/mean": 0.412, "length/mean": 31.4, "time/step": 0.612}
    rest = {"reward/mean": 0.5, "eval/accuracy": 0.521}, {"reward/mean": float("nan"), "length/mean": None}
    for step, metrics in enumerate((first, *rest), 1):
        clock.now += INTERVAL
        console.step(step, metrics)
    console.note("saved [step 3]")
    console.warn("odd")
    console.stop()
    assert out.getvalue().splitlines() == [
        "demo: 240 steps",
        "step 1/240  reward 0.41  len 31  0.61 s  eta 19m55s",
        "step 2/240  reward 0.50  eval 0.52  eta 19m50s",
        "step 3/240  eta 19m45s",
        "saved [step 3]",
        "warning: odd",
    ]


def test_eta_of_a_resumed_run_counts_its_own_steps() -> None:
    console, out, clock = plain()
    console.start(240, "demo", done=200)
    clock.now += 10
    console.step(201, {})
    assert out.getvalue().splitlines() == ["demo: 40 steps, from step 200", "step 201/240  eta 6m30s"]


def test_plain_steps_are_limited_to_one_line_per_interval_besides_the_first_evaluations_and_the_last() -> None:
    console, out, clock = plain()
    console.start(99, "warm start")
    for step in range(1, 100):
        clock.now += INTERVAL / 40
        console.step(step, {"sft/loss": 1.25, **({"eval/accuracy": 0.5} if step == 60 else {})})
    shown = [line.split()[1] for line in out.getvalue().splitlines()[1:]]
    assert shown == ["1/99", "41/99", "60/99", "99/99"]
    assert "loss 1.250" in out.getvalue()


def test_plain_operations_are_limited_to_one_line_per_interval() -> None:
    console, out, clock = plain()
    console.note("start")
    for done in range(64):  # 8 seconds
        console.progress("sampling", done, 64, "answers", tokens=100 * done)
        clock.now += 0.125
    console.progress("sampling", 64, 64, "answers", tokens=6400)
    for _ in range(80):  # short operations are not shown
        console.progress("training", 0, 2332, "tokens")
        clock.now += 0.15
        console.progress("training", 2332, 2332, "tokens")
    console.progress("training", 0, 4096, "tokens")
    clock.now += 8
    console.progress("training", 1024, 4096, "tokens")  # of its own count
    assert out.getvalue().splitlines() == [
        *("start", "sampling  40/64 answers  800 tokens/s  eta 3s"),
        "training  1,024/4,096 tokens  128 tokens/s  eta 24s",
    ]


def test_an_operation_that_has_counted_nothing_is_shown_after_a_longer_time() -> None:
    console, out, clock = plain()
    for _ in range(8):  # 16 seconds
        console.progress("training", 0, 2332, "tokens")
        clock.now += 2
    console.progress("training", 0, 2332, "tokens")
    assert out.getvalue().splitlines() == ["training  0/2,332 tokens"]


def test_the_length_limit_bounds_the_remaining_time_while_no_answer_is_finished() -> None:
    console, out, clock = plain()
    console.note("start")
    console.progress("evaluating", 0, 10, "answers", tokens=0, most_tokens=1000)
    for done, tokens, most in ((0, 400, 1000), (4, 500, 700), (8, 600, 610)):
        clock.now += 10
        console.progress("evaluating", done, 10, "answers", tokens, most)
    console.progress("evaluating", 10, 10, "answers", 610, 610)
    assert out.getvalue().splitlines()[1:] == [
        "evaluating  0/10 answers  40 tokens/s  eta at most 15s",  # 600 more tokens at 40 tokens/s
        "evaluating  4/10 answers  25 tokens/s  eta at most 8s",  # by the number of answers: 30 s
        "evaluating  8/10 answers  20 tokens/s  eta at most 0s",  # 10 more tokens at 20 tokens/s
    ]


def test_loading_is_announced_at_once_and_once() -> None:
    console, out, clock = plain()
    console.announce("loading org/model")
    console.announce("loading org/model")
    assert out.getvalue() == "loading org/model\n"
    clock.now += 30  # imports, which do not count for the remaining time
    console.progress("loading org/model", 200_000_000, 1_540_000_000, "parameters")
    clock.now += 10
    console.progress("loading org/model", 700_000_000, 1_540_000_000, "parameters")
    console.progress("loading org/model", 1_540_000_000, 1_540_000_000, "parameters")
    assert out.getvalue().splitlines()[1:] == [
        "loading org/model  200M/1.54B parameters",
        "loading org/model  700M/1.54B parameters  eta 17s",
    ]


def test_terminal_shows_an_operation_beside_the_run_and_removes_it() -> None:
    out, clock = Terminal(), Clock()
    with Console(out, clock=clock) as console:
        console.start(10, "demo")
        for done in range(4):
            console.progress("samp[l]ing", done, 4, "answers", tokens=done * 50)
            clock.now += 1
        shown = wait_for(out, "3/4 answers")
        console.progress("samp[l]ing", 4, 4, "answers")
        out.truncate(0)
        console.step(1, {})
        rest = wait_for(out, "step 1/10")
    for wanted in ("demo", "samp[l]ing", "50 tokens/s", "eta 1s"):
        assert wanted in shown, wanted
    assert "samp" not in rest.rpartition("demo")[2]


def test_terminal_shows_announced_operations_at_once_and_short_ones_not_at_all() -> None:
    out, clock = Terminal(), Clock()
    with Console(out, clock=clock) as console:
        console.announce("loading org/model")
        assert "loading org/model" in out.getvalue()
        console.progress("loading org/model", 9, 9)
        for done in range(3):
            console.progress("judging", done, 2, "answers")
            clock.now += 0.2
    assert "judging" not in out.getvalue()


def test_terminal_is_restored_when_an_operation_is_interrupted() -> None:
    out = Terminal()
    with pytest.raises(KeyboardInterrupt), Console(out) as console:
        console.announce("loading org/model")
        raise KeyboardInterrupt
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")  # the cursor is visible again


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
    console.announce("loading")
    console.start(2, "demo")
    console.step(1, {})
    console.progress("sampling", 1, 2)
    console.note("note")
    console.table("T", ["a"], [["b"]])
    console.warn("careful")
    console.stop()
    assert out.getvalue() == "warning: careful\n"


def test_durations_and_counts_are_short() -> None:
    seconds = (0, 59.4, 59.6, 130, 11_100, -1)
    assert [*map(duration, seconds)] == ["0s", "59s", "1m00s", "2m10s", "3h05m", "0s"]
    assert [*map(count, (0, 860_416, 134_515_008, 1_543_714_304))] == ["0", "860,416", "135M", "1.54B"]


UNSAFE = [*map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)))]


@settings(max_examples=25)
@given(st.text(alphabet=st.one_of(st.sampled_from(UNSAFE), st.sampled_from("a é 日 👩\u200f\n\t"))))
def test_no_control_character_is_left_and_other_text_is_unchanged(text: str) -> None:
    shown = printable(text)
    assert not set(shown) & set(UNSAFE)
    assert shown == text or set(text) & set(UNSAFE)
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


def test_a_fraction_is_never_rounded_to_0_or_1() -> None:
    assert [fraction(value) for value in (0, 1, 0.5, 0.994, 1.7, -0.001)] == [
        *("0.00", "1.00", "0.50", "0.99", "1.70", "-0.00")
    ]
    assert [fraction(value) for value in (0.996, 0.004, 0.9996, 0.99999)] == ["0.996", "0.004", "0.9996", "0.99999"]


def test_remaining_time_is_not_estimated_from_a_tiny_part_of_an_operation() -> None:
    operation = Operation("loading", started=0.0, first=(0, 0, 0.0))
    assert operation.facts(960, 247_424, "parameters", 0, now=5.0) == "960/247,424 parameters"
    assert operation.facts(123_712, 247_424, "parameters", 0, now=6.0).endswith("eta 6s")
