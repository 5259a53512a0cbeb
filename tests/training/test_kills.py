"""A run that is killed at any file operation and resumed ends with the same files as one that was never killed.

A kill between two file operations has the effect of a kill before the second one: both lose what is in memory.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
from kill_server import KillServer
from small_run import SmallRuns

from assay.runs import checkpoints

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
# Small, with all that a run writes: warm start, reference, evaluations, best, pruned checkpoints and rollouts.
EVERYTHING = (
    *("--train.steps", 3, "--train.prompts", 2, "--train.samples", 2, "--sampling.max_new_tokens", 4),
    *("--save.every", 1, "--save.keep", 1, "--save.rollouts", 2, "--sft.steps", 1, "--sft.batch", 2),
    *("--eval.every", 2, "--eval.examples", 2, "--eval.final_examples", 2, "--algo.kl_coef", 0.1),
)
LORA = ("--lora.rank", 2, "--lora.alpha", 4, "--replay.groups", 1)
PPO = ("--algo.recipe", "ppo", "--critic.lr", 1e-3, "--algo.reward_kl_coef", 0.05, "--algo.kl_coef", 0.0)
NOT_COMPARED = ("environment.json", ".lock")  # when, where and by which process


class Lives:
    """Starts, kills and resumes a run in its own folder, on one of a few servers."""

    def __init__(self, folder: Path, words: tuple[object, ...], servers: SimpleQueue[KillServer]) -> None:
        small = SmallRuns(folder)
        self.folder, self.servers = folder, servers
        self.words = ("train", small.config, *words, "--runs_dir", "runs")
        self.whole = folder / "whole"
        self.whole.mkdir()
        self.volatile: list[str] = []
        self.events = self.live(self.whole) or []
        self.files = files_of(self.whole)

    def live(self, cwd: Path, die_at: int = 0) -> list[str] | None:
        """Start or resume; the events of a life that came to its end, None for one that was cut short."""
        begun = (cwd / "runs" / "small" / "config.toml").exists()
        words = ("train", "--resume", "small", "--runs_dir", "runs") if begun else self.words
        server = self.servers.get()
        try:
            result = server.run(cwd, *words, die_at=die_at)
        finally:
            self.servers.put(server)
        if result.code == -9:
            return None
        assert result.code == 0, result.said
        self.volatile += result.volatile
        return result.events

    def die_and_compare(self, first: int) -> int:
        """Die at event `first`, and at another one while resuming; the number of deaths."""
        cwd = self.folder / f"killed-{first}"
        cwd.mkdir()
        assert self.live(cwd, first) is None, "the run came to its end before the event"
        sound(cwd)
        # Spread out over what is still to be done, which is less after a late death.
        second = 1 + random.Random(first).randrange(max(len(self.events) - first, 12))
        died_again = self.live(cwd, second) is None
        sound(cwd)
        if died_again:
            assert self.live(cwd) is not None
        left = files_of(cwd)
        where = f"killed at {first} ({self.events[first - 1]}), then at {second if died_again else 'nothing'}"
        assert left.keys() == self.files.keys(), f"{where}: {left.keys() ^ self.files.keys()}"
        differing = [name for name in left if left[name] != self.files[name]]
        assert not differing, f"{where}: {differing} differ from those of a run that was never killed"
        shutil.rmtree(cwd)
        return 1 + died_again


def sound(cwd: Path) -> None:
    """Assert that every folder with the name of a checkpoint is complete, since other processes may load it."""
    run = cwd / "runs" / "small"
    for folder in (*(run / "checkpoints").glob("step-*"), *filter(Path.is_dir, (run / "base", run / "reference"))):
        assert checkpoints.problems(folder) == []


def files_of(cwd: Path) -> dict[str, bytes]:
    """Content of every file of the runs folder. Times in these runs are constant."""
    files = [path for path in (cwd / "runs").rglob("*") if path.is_file() and path.name not in NOT_COMPARED]
    return {path.relative_to(cwd).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def servers() -> Iterator[SimpleQueue[KillServer]]:
    queue: SimpleQueue[KillServer] = SimpleQueue()
    for _ in range(2):
        queue.put(KillServer())
    yield queue
    for _ in range(2):
        queue.get().close()


def kill_everywhere(lives: Lives, events: list[int]) -> int:
    """Kill a run at each event. Returns the number of kills; fails with all differences."""
    failures: list[str] = []

    def attempt(event: int) -> int:
        try:
            return lives.die_and_compare(event)
        except AssertionError as error:
            failures.append(f"event {event}: {error}")
            return 0

    with ThreadPoolExecutor(2) as threads:
        deaths = sum(threads.map(attempt, events))
    assert not failures, "\n".join([f"{len(failures)} of {len(events)} events", *failures])
    return deaths


def kinds_of(events: list[str], parts: tuple[str, ...]) -> list[int]:
    """Numbers of the events on files of these parts, one for each operation and file name: steps are drawn."""
    kinds: dict[str, list[int]] = {}
    for number, event in enumerate(events, 1):
        if any(part in event for part in parts):
            kinds.setdefault(re.sub(r"\d+", "N", event), []).append(number)
    draw = random.Random(0)
    return sorted(draw.choice(numbers) for numbers in kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parts", "least"),
    [
        pytest.param((), ("",), 80, id="plain"),
        pytest.param(LORA, ("base", "adapter", "replay", "reference"), 30, id="lora, replay"),
        pytest.param(PPO, ("critic",), 3, id="critic"),
    ],
)
def test_a_kill_at_every_kind_of_file_operation_changes_no_file(
    tmp_path: Path, servers: SimpleQueue[KillServer], words: tuple[object, ...], parts: tuple[str, ...], least: int
) -> None:
    """Also: each rename is followed by an fsync of its folder, and all files are flushed before a checkpoint's."""
    lives = Lives(tmp_path, (*EVERYTHING, *words), servers)
    events = kinds_of(lives.events, parts)
    deaths = kill_everywhere(lives, events)
    print(f"{len(events)} of {len(lives.events)} events, {deaths} deaths")
    assert len(events) >= least and deaths > 1.5 * len(events)
    assert sum("os.rename" in event for event in lives.events) > 20 and lives.volatile == []
