"""A run that is killed at any time and resumed ends with the same files as one that was never killed.

`test_death_at_every_file_operation` kills at each operation that changes a file, once, and again during the resume.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
from kill_server import KillServer
from small_run import SmallRuns

from assay.runs import checkpoints

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
SEED = 20
WORDS = ("--save.every", 2, "--eval.every", 5, "--sft.steps", 2, "--sft.batch", 4, "--algo.kl_coef", 0.1)


class Victim:
    """A run that is started by the command line, killed and resumed, until it ends by itself."""

    def __init__(self, small: SmallRuns, steps: int, seed: int) -> None:
        self.small, self.draw = small, random.Random(seed)
        self.words = (*WORDS, "--train.steps", steps, "--name", "killed")
        self.path = small.runs / "killed"
        self.kills: list[str] = []
        self.torn = 0  # saves that a kill left half done

    def live(self, moment: str) -> bool:
        """Start or resume, and kill at the moment; False if the run ended first, as the last life does."""
        begun = (self.path / "config.toml").exists()
        command = ("train", "--resume", "killed") if begun else ("train", self.small.config, *self.words)
        process = self.small.process(*command)
        waited = self._wait(moment, process)
        process.kill()
        said = process.communicate()[0]
        if process.returncode != -9:
            assert process.returncode == 0, said
            return False
        self.kills.append(f"{moment} {waited:.3f}")
        self.torn += any(self.path.glob("checkpoints/.saving-*"))
        return True

    def _wait(self, moment: str, process) -> float:
        begun = time.monotonic()
        size = self._size()
        while process.poll() is None and moment != "never":
            if moment == "start":
                break
            if moment == "loop" and self._size() > size + 1500:  # some steps were logged
                break
            if moment == "saving" and any(self.path.glob("checkpoints/.saving-*")):
                break
            time.sleep(0.0005)
        if moment == "never":
            process.wait()
        longest = {"start": 6.0, "loop": 0.4, "saving": 0.004, "never": 0.0}[moment]
        time.sleep(self.draw.uniform(0.0, longest))
        return time.monotonic() - begun

    def _size(self) -> int:
        file = self.path / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0


@pytest.mark.slow
def test_a_run_killed_twenty_times_has_the_same_files(small: SmallRuns) -> None:
    steps, draw = 120, random.Random(SEED)
    assert small.train(*WORDS, "--train.steps", steps) == 0
    victim = Victim(small, steps, SEED)
    for moment in [*("start", "saving", "loop") * 2, *draw.choices(["start", "saving", "loop"], k=16)]:
        assert victim.live(moment), f"the run ended after {len(victim.kills)} kills: {victim.kills}"
    assert not victim.live("never")
    small.same_run("small", "killed", steps)
    assert [row["step"] for row in small.metrics("killed") if "reward/mean" in row] == list(range(1, steps + 1))
    assert not any(victim.path.rglob(".*tmp*")) and not any(victim.path.rglob(".saving*"))
    assert len(victim.kills) >= 20 and victim.torn >= 2, victim.kills


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


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), LORA], ids=["plain", "lora, replay"])
def test_files_and_names_are_flushed_before_a_checkpoint_is_renamed(
    tmp_path: Path, servers: SimpleQueue[KillServer], words: tuple[object, ...]
) -> None:
    """Each rename is followed by an fsync of its folder, and all files are flushed when a checkpoint is renamed."""
    lives = Lives(tmp_path, (*EVERYTHING, *words), servers)
    assert sum("os.rename" in event for event in lives.events) > 20
    assert lives.volatile == []
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    assert lives.live(resumed, len(lives.events) // 2) is None
    assert lives.live(resumed) and lives.volatile == []


@pytest.mark.slow
def test_a_kill_at_every_file_operation_changes_no_file(tmp_path: Path, servers: SimpleQueue[KillServer]) -> None:
    lives = Lives(tmp_path, EVERYTHING, servers)
    count = len(lives.events)
    deaths = kill_everywhere(lives, list(range(1, count + 1)))
    print(f"{count} events, {deaths} deaths")
    assert count > 200 and deaths > 1.8 * count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "parts", "least"),
    [(LORA, ("base", "adapter", "replay", "reference"), 50), (PPO, ("critic",), 8)],
    ids=["lora, replay", "critic"],
)
def test_a_kill_while_writing_files_of_lora_replay_and_critic_changes_no_file(
    tmp_path: Path, servers: SimpleQueue[KillServer], words: tuple[object, ...], parts: tuple[str, ...], least: int
) -> None:
    lives = Lives(tmp_path, (*EVERYTHING, *words), servers)
    events = [at for at, event in enumerate(lives.events, 1) if any(part in event for part in parts)]
    deaths = kill_everywhere(lives, events)
    print(f"{len(events)} of {len(lives.events)} events, {deaths} deaths")
    assert len(events) > least and deaths > 1.5 * len(events)
