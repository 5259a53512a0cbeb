"""One asynchronous run through many faults: servers die, hang, restart, lose connections; the learner is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway import Gateway
from small_run import SmallRuns
from waiting import comes_true, until

from assay.runs.rollouts import read_rollouts
from assay.system.program import free_port
from assay.training.sources import version_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves", "one_thread")]
PROMPTS, STEPS, STALENESS, SERVERS = 3, 600, 2, 3
EVERY = 2  # steps between two faults, at least
# Slow until all faults were injected.
REWARD = """
import os, time

def reward(completion, answer):
    if os.path.exists(os.path.join(os.path.dirname(__file__), "hold")):
        time.sleep(0.15)
    return {"reward": sum(map(ord, completion)) % 4 / 3, "parsed": completion}
"""


class Node:
    """A server process and the gateway before it."""

    def __init__(self, model: Path) -> None:
        self.model, self.port = model, free_port()
        self.process = self._start()
        self.gateway = Gateway(self.port)

    def _start(self) -> subprocess.Popen[bytes]:
        words = ["serve", str(self.model), "--port", str(self.port), "--allow-updates", "--http.frontends", "0"]
        words += ["--engine.dtype", "float32", "--device", "cpu", "--threads", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([sys.executable, "-m", "assay", *words], env=environment, **quiet)

    @property
    def healthy(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=2).status_code == 200
        return False

    def inject(self, fault: str) -> None:
        """Let something go wrong, and mend it."""
        if fault in ("dies", "restarts empty"):
            self.process.kill()
            self.process.wait()
            time.sleep(1.0 if fault == "dies" else 0.0)
            self.process = self._start()
            until(lambda: self.healthy, 120)
        elif fault == "hangs":
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(2.5)
            self.process.send_signal(signal.SIGCONT)
        elif fault == "refuses connections":
            self.gateway.refuse(0.5)
        elif fault == "loses all connections":
            self.gateway.cut()
        else:
            self.gateway.fault = fault.removeprefix("is ").removeprefix("returns ")
            self.gateway.cut()
            time.sleep(0.7)
            self.gateway.fault = ""
            self.gateway.cut()

    def close(self) -> None:
        self.gateway.close()
        self.process.kill()
        self.process.wait()


SERVER_FAULTS = [
    *("dies", "restarts empty", "hangs", "refuses connections", "loses all connections", "returns garbage", "is slow")
]
LEARNER_FAULTS = {"the learner is killed": signal.SIGKILL, "the learner is stopped": signal.SIGTERM}


@contextmanager
def nodes(model: Path) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        made = [Node(model) for _ in range(SERVERS)]
        for node in made:
            stack.callback(node.close)
        for node in made:
            until(lambda: node.healthy, 120)  # noqa: B023
        yield made


class Learner:
    """The training process, which is started again after it was killed."""

    def __init__(self, runs: SmallRuns, words: list[Any]) -> None:
        self.runs, self.output = runs, runs.folder / "output.txt"
        self.process = self._start("train", runs.config, *words)

    def _start(self, *words: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "assay", *map(str, words), "--runs_dir", str(self.runs.runs)]
        with self.output.open("a") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})

    @property
    def steps(self) -> int:
        return int(self.runs.last_metrics().get("step", 0))

    def reach(self, step: int) -> None:
        """Wait until this step, and until all servers serve: faults of all servers at once end a run."""

        def reached() -> bool:
            last = self.runs.last_metrics()
            serve = last.get("step", 0) >= step and last.get("servers/serving", 0) >= SERVERS
            return serve or self.process.poll() is not None

        assert comes_true(reached, 120), f"no progress after step {self.steps}: {self.output.read_text()[-3000:]}"

    def end(self, signum: int) -> None:
        """End the process, and wait until it has been resumed: it does not start without all of its servers."""
        self.process.send_signal(signum)
        self.process.wait(120)
        ended_at = self.steps
        self.process = self._start("train", "--resume", "small")
        self.reach(ended_at + 1)


def test_a_run_survives_many_faults_and_trains_every_group_once(small: SmallRuns, tmp_path: Path) -> None:
    sizes = f"args = {{train_size = {STEPS * PROMPTS}, eval_size = 10}}"
    small.config.write_text(small.config.read_text().replace("args = {train_size = 24, eval_size = 10}", sizes))
    assert small.train("--train.steps", 1, "--name", "first") == 0  # its model is served at first
    (tmp_path / "reward.py").write_text(REWARD)
    hold = tmp_path / "hold"
    hold.touch()
    faults = random.Random(1)
    plan = [*SERVER_FAULTS * 7, *LEARNER_FAULTS, *LEARNER_FAULTS, "the learner is killed"]
    faults.shuffle(plan)
    done: Counter[str] = Counter()
    with nodes(small.checkpoint(1, "first") / "model") as servers:
        words: list[Any] = ["--train.steps", STEPS, "--source", "async", "--source.max_staleness", STALENESS]
        words += ["--engine", "assay", "--server.urls", json.dumps([node.gateway.url for node in servers])]
        words += ["--server.health_timeout_s", 1, "--save.every", 5, "--save.keep", 3, "--eval.every", 0]
        learner = Learner(small, words)
        for fault in plan:
            learner.reach(learner.steps + EVERY)
            assert learner.process.poll() is None, f"ended after {done}: {learner.output.read_text()[-3000:]}"
            if fault in LEARNER_FAULTS:
                learner.end(LEARNER_FAULTS[fault])
            else:
                faults.choice(servers).inject(fault)
            done[fault] += 1
        hold.unlink()
        assert learner.process.wait(300) == 0, learner.output.read_text()[-3000:]
    said = learner.output.read_text()
    groups = {step: read_rollouts(small.runs / "small", step) for step in range(1, STEPS + 1)}
    ids = [group.prompt.id for some in groups.values() for group in some]
    assert len(ids) == len(set(ids)) == STEPS * PROMPTS  # one epoch: none is lost, none is trained twice
    assert all(0 <= step - 1 - version_of(group) <= STALENESS for step, some in groups.items() for group in some)
    assert done.total() >= 50 and said.count("has failed and gets no more requests") >= 20
    assert said.count("serves again, with the weights of version") >= 20 and "Traceback" not in said
    print(json.dumps({"faults": done, "failed": said.count("has failed"), "again": said.count("serves again")}))
