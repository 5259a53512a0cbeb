"""Length of a run in steps, epochs or a budget of answers; runs that are asked to stop, at any point, and resumed."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns, inject, mostly_slow

from assay.config import LoopConfig
from assay.rollout import Collector
from assay.runs import checkpoints
from assay.tasks.base import UNLIMITED
from assay.training import checkpoint
from assay.training.learner.update import Updater
from assay.training.progress import RunState, Schedule, Stopped, Stopping
from assay.training.sync import WeightSync
from assay.types import UserError


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"steps": 7}, 7),
        ({"steps": 7, "epochs": 2.0}, 8),  # 2 x 31 prompts, 8 per step
        ({"steps": 7, "epochs": 0.5}, 2),
        ({"steps": 7, "budget": 100}, 4),  # 8 x 4 answers per step
        ({"steps": 7, "budget": 96}, 3),
    ],
)
def test_total_steps_by_steps_epochs_or_budget(settings: dict, steps: int) -> None:
    schedule = Schedule.of(LoopConfig(prompts=8, samples=4, **settings), prompts=31)
    assert schedule.total_steps == steps and schedule.answers_per_step == 32


def test_epochs_of_an_endless_split_are_refused() -> None:
    with pytest.raises(UserError, match=r"set train\.steps"):
        Schedule.of(LoopConfig(epochs=1.0), prompts=UNLIMITED)


def test_a_run_is_done_after_its_steps() -> None:
    schedule = Schedule(total_steps=3)
    assert [schedule.done(RunState(step=step)) for step in range(5)] == [False, False, False, True, True]
    assert schedule.done(RunState(step=2), ahead=1) and not schedule.done(RunState(step=1), ahead=1)
    assert not schedule.done(RunState(), answers=10**6)  # without a budget, answers do not count


def test_a_budget_ends_a_run_by_answers_and_drives_the_schedule() -> None:
    schedule = Schedule(total_steps=4, answers_per_step=32, budget=100)
    assert not schedule.done(RunState(step=1, answers=99)) and schedule.done(RunState(step=1, answers=100))
    assert schedule.done(RunState(step=1, answers=60), answers=40)
    assert schedule.done(RunState(step=4))
    answers = (1, 32, 33, 64, 65, 128, 500)
    assert [schedule.progress(RunState(step=9, answers=count)) for count in answers] == [0, 0, 1, 1, 2, 3, 3]
    assert Schedule(total_steps=4).progress(RunState(step=2, answers=500)) == 2


def test_periodic_work_is_due_every_n_steps_and_at_the_end() -> None:
    schedule = Schedule(total_steps=5)
    assert [step for step in range(1, 6) if schedule.due(2, RunState(step=step))] == [2, 4, 5]
    assert [step for step in range(1, 6) if schedule.due(0, RunState(step=step))] == [5]


pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 5
WORDS = ("--train.steps", STEPS, "--save.every", 4, "--eval.every", 3, "--sft.steps", 2, "--sft.batch", 4)
WORDS = (*WORDS, "--algo.kl_coef", 0.1)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    small = SmallRuns(tmp_path_factory.mktemp("stopping"))
    assert small.train(*WORDS) == 0
    return small


COLLECT, SERVE, UPDATE = (Collector, "collect"), (Collector, "_serve"), (Updater, "update")
WRITE_FILES = (checkpoint, "write_files")
Moment = tuple[tuple[Any, str], int, int | None]
# During what the signal arrives: the function, which call of it, and the step of the last checkpoint afterwards.
FINISHED: dict[str, Moment] = {
    "the warm start": ((Updater, "step"), 1, 0),
    "sampling": (COLLECT, 3, 2),
    "the weight sync": ((WeightSync, "sync"), 3, 2),
    "saving": (WRITE_FILES, 2, 3),
}
# The same where the work takes longer than the grace time and is interrupted.
INTERRUPTED = {"the first evaluation": (SERVE, 1, 0), "sampling": (SERVE, 3, 1), "the last evaluation": (SERVE, 9, 5)}


def stopped_and_resumed(
    small: SmallRuns,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    moment: Moment,
    action: Callable[[], None],
    *words: object,
) -> None:
    target, call, saved = moment
    with monkeypatch.context() as patch:
        inject(patch, *target, call, action)
        assert small.train(*WORDS, *words, "--name", name) == 143
    path = small.runs / name
    assert checkpoints.last_intact(path) == (saved, [])
    assert not (path / "summary.json").exists()
    assert small.resume(name) == 0
    small.same_run("small", name, STEPS)


@pytest.mark.parametrize("moment", mostly_slow(FINISHED, quick=["sampling"]))
def test_a_signal_lets_the_step_finish_and_saves_a_checkpoint(
    complete: SmallRuns, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], moment: str
) -> None:
    def strike() -> None:
        signal.raise_signal(signal.SIGTERM)

    name = f"finished-{moment.replace(' ', '-')}"
    stopped_and_resumed(complete, name, monkeypatch, FINISHED[moment], strike)
    shown = capfd.readouterr()
    assert f"assay train --resume {complete.runs / name}" in shown.out
    assert "finishing the step" in shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize("moment", mostly_slow(INTERRUPTED, quick=["sampling"]))
def test_sampling_and_evaluation_are_interrupted_after_the_grace_time(
    complete: SmallRuns, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    spent: list[float] = []

    def strike() -> None:
        started = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        try:
            time.sleep(60)
        finally:
            spent.append(time.monotonic() - started)

    name = f"interrupted-{moment.replace(' ', '-')}"
    stopped_and_resumed(complete, name, monkeypatch, INTERRUPTED[moment], strike, "--save.grace_s", 0.3)
    assert 0.25 < spent[0] < 20


@pytest.mark.slow
def test_an_update_is_never_interrupted(complete: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)

    moment = (UPDATE, 3, 3)  # the evaluation that is due afterwards is interrupted at once: the grace time is over
    stopped_and_resumed(complete, "update", monkeypatch, moment, strike, "--save.grace_s", 0.05)


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_leaves_the_earlier_checkpoint(
    complete: SmallRuns, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def strike() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a launcher may forward the same signal: not a second request
        time.sleep(0.4)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the run was not stopped")

    with monkeypatch.context() as patch:
        inject(patch, *WRITE_FILES, 2, strike)
        assert complete.train(*WORDS, "--name", "at-once") == 130
    assert checkpoints.last_intact(complete.runs / "at-once") == (0, [])
    assert "saved after step 0 of 5" in capfd.readouterr().out
    assert complete.resume("at-once") == 0
    complete.same_run("small", "at-once", STEPS)


@pytest.mark.slow
def test_a_repeated_sigterm_changes_nothing(complete: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.4)
        signal.raise_signal(signal.SIGTERM)

    stopped_and_resumed(complete, "repeated", monkeypatch, (WRITE_FILES, 2, 3), strike)


@pytest.mark.slow
def test_a_run_can_be_stopped_twice_in_the_same_evaluation(
    complete: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)

    for call, start in ((5, True), (1, False)):
        with monkeypatch.context() as patch:
            inject(patch, *SERVE, call, strike)
            words = (*WORDS, "--name", "twice", "--save.grace_s", 0.1)
            assert (complete.train(*words) if start else complete.resume("twice")) == 143
        assert checkpoints.last_intact(complete.runs / "twice") == (3, [])
    assert complete.resume("twice") == 0
    complete.same_run("small", "twice", STEPS)


@pytest.mark.slow
def test_a_process_exits_with_the_code_of_its_signal(complete: SmallRuns) -> None:
    """Judge processes, which also get a signal that goes to the complete process group, report no errors."""
    words = (*WORDS, "--name", "process", "--train.steps", 200, "--reward.workers", 1)
    process = complete.process("train", complete.config, *words)
    wait_for_metrics(complete, "process", process)
    for pid in children(process.pid):
        os.kill(pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    shown = process.communicate(timeout=60)[0]
    assert process.returncode == 143, shown
    assert f"assay train --resume {complete.runs / 'process'}" in shown and "Traceback" not in shown
    rows = [row for row in complete.metrics("process") if "reward/mean" in row]
    assert checkpoints.last_intact(complete.runs / "process") == (rows[-1]["step"], [])
    assert not any("status/error" in row for row in rows)


def wait_for_metrics(
    small: SmallRuns, name: str, process: subprocess.Popen[str], meanwhile: Callable[[], None] = lambda: None
) -> None:
    metrics = small.runs / name / "metrics.jsonl"
    while not (metrics.exists() and '"step": 4' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        meanwhile()
        time.sleep(0.01)


def take_terminal() -> None:
    """In the new process: stdin is its controlling terminal, and SIGHUP is not ignored, even if these tests run so."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_a_closed_terminal_saves_a_checkpoint_and_stops(complete: SmallRuns) -> None:
    """SIGHUP, after which nothing can be written to the terminal."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = (*WORDS, "--name", "terminal", "--train.steps", 500, "--runs_dir", complete.runs)
    process = subprocess.Popen(
        [sys.executable, "-m", "assay", "train", *map(str, (complete.config, *words))],
        **dict.fromkeys(("stdin", "stdout", "stderr"), end),
        env=environment,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(end)
    os.set_blocking(terminal, False)

    def read_terminal() -> None:
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)

    wait_for_metrics(complete, "terminal", process, read_terminal)
    os.close(terminal)
    assert process.wait(timeout=120) == 128 + signal.SIGHUP
    rows = [row for row in complete.metrics("terminal") if "reward/mean" in row]
    assert checkpoints.last_intact(complete.runs / "terminal") == (rows[-1]["step"], [])


def test_under_nohup_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stopping = Stopping(30.0)
        with stopping.watching():
            signal.raise_signal(signal.SIGHUP)
            stopping.check()
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.4)
            with pytest.raises(Stopped, match="SIGINT"):
                signal.raise_signal(signal.SIGINT)  # stops at once; SIGHUP must still be ignored afterwards
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_signal_handlers_are_restored() -> None:
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(s) for s in watched]
    stopping = Stopping(30.0)
    with stopping.watching():
        stopping.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Stopped):
            stopping.check()
    assert [signal.getsignal(s) for s in watched] == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_outside_the_main_thread_signals_are_not_watched() -> None:
    before, after = signal.getsignal(signal.SIGTERM), []

    def watch() -> None:
        with Stopping(30.0).watching():
            after.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert after == [before]
