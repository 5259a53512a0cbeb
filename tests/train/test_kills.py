"""Killed again and again at random moments and resumed each time, a run is the run that was never killed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from small_run import SmallRuns

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
SEED = 20
WORDS = ("--save.every", 2, "--eval.every", 5, "--sft.steps", 2, "--sft.batch", 4, "--algo.kl_coef", 0.1)


class Victim:
    """A run that is started by the real command line, killed, and resumed, until it ends by itself."""

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


def kill_and_compare(small: SmallRuns, steps: int, moments: list[str], seed: int) -> Victim:
    assert small.train(*WORDS, "--train.steps", steps) == 0
    victim = Victim(small, steps, seed)
    for moment in moments:
        assert victim.live(moment), f"seed {seed}: the run ended after {len(victim.kills)} kills: {victim.kills}"
    assert not victim.live("never")
    try:
        small.same_run("small", "killed", steps)
        rows = [row["step"] for row in small.metrics("killed") if "reward/mean" in row]
        assert rows == list(range(1, steps + 1))
        assert not any((small.runs / "killed").rglob(".*tmp*")) and not any((small.runs / "killed").rglob(".saving*"))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, kills {victim.kills}") from error
    return victim


def test_three_kills_change_nothing(tmp_path: Path) -> None:
    victim = kill_and_compare(SmallRuns(tmp_path), 14, ["loop", "saving", "loop"], SEED)
    assert len(victim.kills) == 3


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    moments = [*("start", "saving", "loop") * 2, *draw.choices(["start", "saving", "loop"], k=16)]
    victim = kill_and_compare(SmallRuns(tmp_path), 120, moments, SEED)
    assert len(victim.kills) >= 20 and victim.torn >= 2, victim.kills
