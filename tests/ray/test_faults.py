"""Deaths of servers, learners, their actors, judges, nodes and the head, in two runs on Ray clusters.

ASSAY_RAY_FAULTS multiplies the number of faults of the asynchronous run; docs/evidence/reliability.md has the results
of a run with 6.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_parts import ClusterRun, Nodes, actor_of
from safetensors.torch import load_file
from small_run import SmallRuns

from assay.runs.rollouts import read_rollouts
from assay.training.sources import version_of

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
AGAIN = "start again from the last checkpoint"
TIMES = int(os.environ.get("ASSAY_RAY_FAULTS", "1"))
PROMPTS, STEPS, STALENESS, SERVERS = 3, 100 + 200 * TIMES, 2, 2
PLAN = {
    "a server is killed": 2,
    "the actor of a server is killed": 2,
    "a server hangs": 1,
    "the learner is killed": 1,
    "the actor of the learner is killed": 1,
    "a judge actor is killed": 1,
    "a node is lost": 1,
}
# Slow until all faults were injected.
REWARD = """
import contextlib, os, time

def reward(completion, answer):
    with contextlib.suppress(OSError):
        time.sleep(float(open(os.path.join(os.path.dirname(__file__), "hold")).read()))
    return {"reward": sum(map(ord, completion)) % 4 / 3, "parsed": completion}
"""


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def inject(fault: str, run: ClusterRun, nodes: Nodes, chance: random.Random) -> None:
    if fault == "a node is lost":
        nodes.kill(chance.choice([number for number in range(1, len(nodes.nodes)) if number not in nodes.lost]))
        nodes.add()
        return
    pids = run.judges() if "judge" in fault else run.learners() if "learner" in fault else run.servers()
    pid = chance.choice(pids)
    if "hangs" in fault:
        os.kill(pid, signal.SIGSTOP)
    else:
        kill(actor_of(pid) if "actor of" in fault else pid)


def has_restarted(run: ClusterRun, restarts: int, step: int) -> bool:
    return run.said.count(AGAIN) > restarts and run.steps > step


def test_an_asynchronous_run_survives_many_faults_and_trains_every_group_once(tmp_path: Path, cluster: Nodes) -> None:
    runs = SmallRuns(tmp_path)
    sizes = f"args = {{train_size = {STEPS * PROMPTS}, eval_size = 10}}"
    runs.config.write_text(runs.config.read_text().replace("args = {train_size = 24, eval_size = 10}", sizes))
    (tmp_path / "reward.py").write_text(REWARD)
    hold = tmp_path / "hold"
    hold.write_text("0.3")
    chance = random.Random(TIMES)
    plan = [fault for fault, times in PLAN.items() for _ in range(times * TIMES)]
    chance.shuffle(plan)
    done: Counter[str] = Counter()
    words: list[Any] = ["--train.steps", STEPS, "--source", "async", "--source.max_staleness", STALENESS]
    words += ["--engine", "assay", "--server.health_timeout_s", 4, "--save.every", 5, "--save.keep", 3]
    words += ["--eval.every", 0, "--cluster.address", cluster.address, "--cluster.restarts", 1000]
    words += ["--cluster.spread", "true", "--cluster.engines", SERVERS, "--reward.pool", "ray", "--reward.workers", 1]
    with closing(ClusterRun(runs, *words)) as run:
        for fault in plan:
            run.reach(run.steps + 2, serving=SERVERS)
            before, restarts = run.steps, run.said.count(AGAIN)
            inject(fault, run, cluster, chance)
            done[fault] += 1
            print(fault, "after step", before, flush=True)
            if "learner" in fault:  # its metrics are there until it has resumed
                run.wait_until(partial(has_restarted, run, restarts, before), 240)
        run.reach(run.steps + 2, serving=SERVERS)
        hold.unlink()
        assert run.ended(900) == 0, run.said[-4000:]
    groups = {step: read_rollouts(run.path, step) for step in range(1, STEPS + 1)}
    ids = [group.prompt.id for some in groups.values() for group in some]
    assert len(ids) == len(set(ids)) == STEPS * PROMPTS  # one epoch: none is lost, none is trained twice
    assert all(0 <= step - 1 - version_of(group) <= STALENESS for step, some in groups.items() for group in some)
    assert done.total() == len(plan) and "Traceback" not in run.said
    counts = {"failed": "has failed and", "again": "serves again", "restarts": AGAIN, "judges": "judge actor is lost"}
    print(json.dumps({"faults": done, **{name: run.said.count(text) for name, text in counts.items()}}))


def test_learners_and_the_head_are_lost_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "10")  # for the head to come back; 60 by default
    runs = SmallRuns(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    hold = tmp_path / "hold"
    hold.write_text("0.1")
    words = ["--train.steps", 40, "--train.prompts", 4, "--eval.every", 0, "--save.every", 4, "--dtype", "float64"]
    words += ["--engine.dtype", "float64"]
    sizes = ["--cluster.learners", 2, "--cluster.spread", "true"]
    with Nodes() as nodes, closing(ClusterRun(runs, *words, *sizes, "--cluster.address", nodes.address)) as run:
        for number, step in enumerate((6, 14)):
            run.wait_until(lambda step=step: run.steps >= step, 240)
            kill(sorted(run.learners())[number])
        run.wait_until(lambda: run.steps >= 22, 240)
        nodes.kill(0)
        code = run.ended()
        assert code == 2 and "Traceback" not in run.said, run.said[-3000:]
        assert run.said.count(AGAIN) == 2
        assert f"assay train --resume {run.path}" in run.said.splitlines()[-1]
        assert not run.learners()
    hold.unlink()
    undisturbed = runs.launch(2, "train", runs.config, "--name", "undisturbed", *words)
    said, _ = undisturbed.communicate(timeout=240)
    assert undisturbed.returncode == 0, said
    run.process = run.start("train", "--resume", "small", "--cluster.address", "")  # in a Ray of its own
    assert run.ended() == 0, run.said[-3000:]
    weights = [
        load_file(runs.checkpoint(40, name) / "model" / "model.safetensors") for name in ("small", "undisturbed")
    ]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    for step in range(1, 41):
        assert read_rollouts(run.path, step) == read_rollouts(runs.runs / "undisturbed", step)
