from __future__ import annotations

import io
import itertools
import time

import pytest

from assay.runs.console import Console, aligned, duration


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
