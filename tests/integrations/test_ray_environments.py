"""Environments on the nodes of a real Ray cluster on this machine, whose actors are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import Nodes
from small_run import SmallRuns

from assay.build.problems import build_problems
from assay.config import EnvConfig, TaskConfig
from assay.integrations.ray import environments as module
from assay.integrations.ray.environments import ClusterEnv
from assay.system.awaiting import resolve, together
from assay.types import Status, UserError

pytestmark = pytest.mark.ray
ray: Any = pytest.importorskip("ray", reason="needs the package ray")
CODE = """
import os
from assay.envs import Env

class Counts(Env):
    name, max_steps, max_return = "counts", 4, 2.0
    def __init__(self, place=False):
        self.place = place
    def reset(self, *, seed=None, options=None):
        self.rng, self.total = seed, 0
        return f"Count to {seed % 7}", {}
    def step(self, action):
        if action == "raise": raise KeyError("no")
        self.total += len(action)
        shown = f"{self.total} of {self.rng % 7}" + (" at " + os.environ["PLACE"] if self.place else "")
        return shown, sum(map(ord, action)) % 4 / 3, self.total > 12, False, {}
class Waits(Counts):
    async def step(self, action):
        return super().step(action)

def fails():
    if "PLACE" in os.environ: raise ImportError("a package of this node is missing")
    return Counts()
"""


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "REFRESH_S", 0.2)
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def env(nodes: Nodes, file: Path) -> Iterator[ClusterEnv]:
    with closing(on_nodes(f"{file}:Counts")) as env:
        yield env


def on_nodes(name: str, **args: Any) -> ClusterEnv:
    env = build_problems(TaskConfig(), EnvConfig(name=name, pool="ray", args=args))
    assert isinstance(env, ClusterEnv)
    return env


def pids(env: ClusterEnv) -> list[int]:
    actors = [node.actor for node in env._nodes.found.values()]
    return ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors])


def start(env: Any, count: int) -> list[Any]:
    episodes = [env.copy() for _ in range(count)]
    resolve(together([episode.reset(seed=seed) for seed, episode in enumerate(episodes)]))
    return episodes


def step(env: ClusterEnv, episodes: list[Any], action: str) -> list[Any]:
    return resolve(together(env.step_all(episodes, [action] * len(episodes))))


def test_episodes_are_spread_over_the_nodes_and_keep_their_state(nodes: Nodes, file: Path) -> None:
    with closing(on_nodes(f"{file}:Counts", place=True)) as env:
        episodes = start(env, 6)
        first, second = step(env, episodes, "abc"), step(env, episodes, "de")
        places = [result[0].partition(" at ")[2] for result in first]
        assert set(places) == {"1", "2"} and places.count("1") == 3
        assert [result[0] for result in second] == [f"5 of {n} at {place}" for n, place in enumerate(places)]
        resolve(episodes[0].reset(seed=9))
        assert resolve(episodes[0].step("a"))[0].startswith("1 of 2 at ")  # starts again, with another seed
        del episodes
        start(env, 2)
        held = [n.actor.__ray_call__.remote(lambda self: len(self._episodes)) for n in env._nodes.found.values()]
        assert sum(ray.get(held)) <= 3  # ended episodes are forgotten


def test_the_python_tool_runs_on_the_nodes(nodes: Nodes) -> None:
    task, args = TaskConfig(name="abacus", args={"style": "plain"}), {"timeout_s": 1.0}
    calls = ["sum(range(4))", "1/0", "sum(1 for _ in range(10**12))", "open('x')"]
    results = []
    for pool in ("local", "ray"):
        with closing(build_problems(task, EnvConfig(name="python", pool=pool, args=args))) as env:
            episodes = start(env, len(calls))
            steps = resolve(together(env.step_all(episodes, [f"<python>{call}</python>" for call in calls])))
            results.append([step[0] for step in steps])
    assert results[0] == results[1] and results[0][0] == "<result>6</result>"


@pytest.mark.parametrize("name", ["Counts", "Waits"])
def test_training_equals_that_with_local_episodes(nodes: Nodes, file: Path, tmp_path: Path, name: str) -> None:
    runs = SmallRuns(tmp_path)
    text = runs.config.read_text()
    runs.config.write_text(text[: text.index("[task]")] + text[text.index("[sampling]") : text.index("[reward]")])
    for pool in ("local", "ray"):
        words = ["--env", f"{file}:{name}", "--env.pool", pool, "--save.every", 2, "--sampling.max_new_tokens", 24]
        words += ["--model.tokenizer", "characters"]
        assert runs.train("--name", pool, *words, "--env.max_tokens", 6) == 0
    runs.same_run("local", "ray", 2)


def test_an_error_of_a_step_is_a_verdict_that_names_the_line(env: ClusterEnv, file: Path) -> None:
    episodes = start(env, 2)
    for *_, info in step(env, episodes, "raise"):
        assert info["verdict"].status is Status.ERROR
        assert "KeyError: 'no'" in info["verdict"].detail and f"{file}:" in info["verdict"].detail


def test_episodes_of_a_lost_actor_are_repeated_elsewhere(env: ClusterEnv) -> None:
    episodes = start(env, 4)
    step(env, episodes, "abc")
    os.kill(pids(env)[0], signal.SIGKILL)
    with pytest.warns(UserWarning, match="an actor with episodes is lost, and others repeat them"):
        results = step(env, episodes, "de")
    assert [result[0] for result in results] == [f"5 of {n}" for n in range(4)]


def test_an_episode_that_cannot_be_repeated_ends_with_an_error(nodes: Nodes, file: Path) -> None:
    with closing(on_nodes(f"{file}:Counts", place=True)) as env:
        episodes = start(env, 2)
        step(env, episodes, "abc")
        os.kill(pids(env)[0], signal.SIGKILL)
        env._nodes.next_search = float("inf")  # no new actor
        with pytest.warns(UserWarning, match="is lost"):
            results = step(env, episodes, "de")
        verdicts = [result[4].get("verdict") for result in results]
        (verdict,) = [verdict for verdict in verdicts if verdict is not None]
        assert verdict.status is Status.ERROR and "answered differently when it was repeated" in verdict.detail


def test_nodes_that_cannot_make_the_environment_are_an_error(nodes: Nodes, file: Path) -> None:
    message = r"env.pool = 'ray': a node cannot make the environment \(.*is missing"
    with closing(on_nodes(f"{file}:fails")) as env, pytest.raises(UserError, match=message):
        start(env, 1)
