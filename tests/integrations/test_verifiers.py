"""Environments of the package verifiers, with its real classes: single-turn, multi-turn and tools."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import main
from assay.envs import make_env
from assay.envs.base import Env, safe_step
from assay.rewards import functions
from assay.system.awaiting import resolve, together
from assay.tasks import make_task
from assay.testing.env import check_env
from assay.types import Status, UserError


def test_without_verifiers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"verifiers:wordle.*\[verifiers\]"):
        make_env("verifiers:wordle")


def test_settings_of_a_run_cannot_load_an_environment_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise UserError(f"no consent to {path}")

    monkeypatch.setattr(functions, "guard", refuse)
    with pytest.raises(UserError, match="no consent to verifiers:wordle"):
        make_env("verifiers:wordle")


def test_a_task_cannot_be_an_environment() -> None:
    with pytest.raises(UserError, match=r"set env\.name"):
        make_task("verifiers:wordle")
    with pytest.raises(UserError, match="has its own problems"):
        make_env("verifiers:wordle", task=make_task("abacus"))


SINGLE = """
    import verifiers.v1 as vf

    class EchoData(vf.TaskData):
        answer: str

    class EchoTask(vf.Task[EchoData]):
        @vf.reward
        async def exact(self, trace):
            if trace.last_reply == "what ?":
                raise ValueError("cannot read this answer")
            return float(trace.last_reply == self.data.answer)

        @vf.reward(weight=0.25)
        async def short(self, trace):
            return float(len(trace.last_reply) < 5)

        @vf.metric
        async def turns(self, trace):
            return trace.num_turns

    class EchoConfig(vf.TasksetConfig):
        count: int = 20

    class Echo(vf.Taskset[EchoTask, EchoConfig]):
        def load(self):
            for n in range(self.config.count):
                shots = [vf.UserMessage(content="echo 99"), vf.AssistantMessage(content="99")]
                prompt = [*shots, vf.UserMessage(content=f"echo {n}")]
                yield EchoTask(EchoData(prompt=prompt, system_prompt="Be brief .", answer=str(n)), self.config.task)

    __all__ = ["Echo"]
"""

MULTI = """
    import verifiers.v1 as vf

    class CountState(vf.State):
        left: int = 0

    class CountTask(vf.Task[vf.TaskData, CountState]):
        @vf.reward
        async def counted(self, trace):
            return 1.0 - trace.state.left / int(self.data.name.split()[-1])

    class Counts(vf.Taskset[CountTask]):
        INFINITE = True

        def load(self):
            n = 0
            while True:
                name = f"game {n} : count from {n % 3 + 1}"
                yield CountTask(vf.TaskData(name=name, system_prompt="Count down ."), self.config.task)
                n += 1

    class CountConfig(vf.EnvConfig):
        player: vf.AgentConfig = vf.AgentConfig(max_turns=6)

    class CountEnv(vf.Env[CountConfig]):
        released = stopped = 0

        async def run(self, task, agents):
            try:
                async with agents.player.interaction(task) as interaction:
                    state = interaction.trace.state
                    state.left = int(task.data.name.split()[-1])
                    segment = await interaction.turn(task.data.name)
                    while not segment.terminated:
                        said = segment.last_reply
                        if said == "crash":
                            raise RuntimeError("the line is down")
                        state.left -= 1 if said == str(state.left) else 0
                        if not state.left:
                            break
                        segment = await interaction.turn(f"{state.left} left")
            finally:
                type(self).released += 1

        async def stop(self):
            type(self).stopped += 1

    __all__ = ["Counts", "CountEnv"]
"""

TOOLS = """
    import verifiers.v1 as vf

    class SumData(vf.TaskData):
        answer: str

    class SumTask(vf.Task[SumData]):
        @vf.reward
        async def exact(self, trace):
            return float(trace.last_reply == self.data.answer)

    class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
        @vf.tool
        async def add(self, a: int, b: int) -> int:
            'Add two numbers.'
            return a + b

    class Sums(vf.Taskset[SumTask]):
        def load(self):
            for n in range(30):
                yield SumTask(SumData(prompt=f"{n} + 1 ?", answer=str(n + 1)), self.config.task)

        @classmethod
        def toolsets(cls, config):
            return [Calculator(vf.SharedToolsetConfig())]

    __all__ = ["Sums"]
    if __name__ == "__main__":  # the process of the tools
        Calculator.run()
"""

TWICE = """
    class TwiceConfig(vf.EnvConfig):
        solver: vf.AgentConfig = vf.AgentConfig()

    class Twice(vf.Env[TwiceConfig]):
        async def run(self, task, agents):
            await asyncio.gather(agents.solver.run(task), agents.solver.run(task))

    __all__ = ["Echo", "Twice"]
"""

CALL = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 3, "b": 1}}\n</tool_call>'


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")  # for the processes of tools
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Env] = []

    def make(source: str, **args: Any) -> Any:
        name = f"vf_env_{abs(hash((source, str(tmp_path)))) % 10**8}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        made.append(make_env(f"verifiers:{name.replace('_', '-')}", **args))
        return made[-1]

    yield make
    for env in made:
        resolve(env.close())


def play(env: Env, prompt: Any, *actions: str) -> list[Any]:
    episode = env.copy()
    resolve(episode.start(prompt))
    return [resolve(safe_step(episode, action)) for action in actions]


def test_single_turn_tasks_become_prompts_and_their_rewards_are_weighted(load: Any) -> None:
    env = load(SINGLE, taskset={"count": 40}, agent={"max_turns": 1})
    assert [len(env.prompts(split)) for split in ("train", "validation", "test")] == [32, 4, 4]
    prompt = next(prompt for prompt in env.prompts("all") if prompt.answer == "23")
    assert [(m["role"], m["content"]) for m in prompt.messages] == [
        ("system", "Be brief ."),
        ("user", "echo 99"),
        ("assistant", "99"),
        ("user", "echo 23"),
    ]
    assert env.max_steps == 1
    ((_, reward, terminated, _, info),) = play(env, prompt, " 23")
    assert (reward, terminated, info["verdict"].status) == (1.25, True, Status.OK)
    assert info["verdict"].parts == {"exact": 1.0, "short": 1.0, "turns": 1.0}
    ((_, reward, _, _, info),) = play(env, prompt, "it is 23")
    assert (reward, info["verdict"].status) == (0.0, Status.WRONG)
    ((_, reward, terminated, _, info),) = play(env, prompt, "what ?")
    assert (reward, terminated, info["verdict"].status) == (0.0, True, Status.ERROR)
    assert "ValueError: cannot read this answer" in info["verdict"].detail


def test_multi_turn_states_are_separate_and_limits_and_errors_end_episodes(load: Any) -> None:
    env = load(MULTI)
    by_start = {prompt.question[-1]: prompt for prompt in env.prompts("validation")[:10]}
    first, second = env.copy(), env.copy()
    resolve(together([first.start(by_start["2"]), second.start(by_start["3"])]))
    ((shown, *_), (other, *_)) = resolve(together(env.step_all([first, second], ["2", "wrong"])))
    assert shown == [{"role": "user", "content": "1 left"}] and other == [{"role": "user", "content": "3 left"}]
    _, reward, terminated, _, info = resolve(first.step("1"))
    assert (reward, terminated, info["verdict"].status) == (1.0, True, Status.OK)
    for _ in range(4):
        assert not resolve(second.step("wrong"))[2]
    _, reward, terminated, _, info = resolve(second.step("3"))  # the sixth turn: max_turns
    assert (reward, terminated, info["verdict"].status) == (pytest.approx(1 / 3), True, Status.WRONG)
    assert env.max_steps == 6
    ((_, reward, terminated, _, info),) = play(env, by_start["1"], "crash")
    assert (reward, terminated, info["verdict"].status) == (0.0, True, Status.ERROR)
    assert "the line is down" in info["verdict"].detail


def test_tools_are_described_in_the_prompt_and_called_from_text(load: Any) -> None:
    env = load(TOOLS)
    prompt = next(prompt for prompt in env.prompts("all") if prompt.question.startswith("3 "))
    assert prompt.messages[0]["role"] == "system" and '"name": "calculator_add"' in prompt.messages[0]["content"]
    called, answered = play(env, prompt, CALL, "4")
    assert called[0] == [{"role": "tool", "content": "4"}] and not called[2]
    assert (answered[1], answered[2]) == (1.0, True)
    for action in (CALL.replace("calculator_add", "no"), "<tool_call>{oops</tool_call>"):
        failed, _ = play(env, prompt, action, "4")
        assert failed[0][0]["role"] == "tool" and "error" in failed[0][0]["content"]


@pytest.mark.parametrize("source", [SINGLE, MULTI, pytest.param(TOOLS, marks=pytest.mark.slow)])
def test_check_env_finds_only_that_there_is_no_gold_policy(load: Any, source: str) -> None:
    problems = [finding.what for finding in check_env(load(source), episodes=3) if not finding.ok]
    assert problems == ["a perfect policy reaches max_return"]


def test_close_ends_episodes_and_stops_the_environment(load: Any) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    env = load(MULTI)
    episode = env.copy()
    resolve(episode.start(env.prompts("train")[0]))
    inner = type(env.env)
    running = len(env.episodes)
    ended = inner.released
    resolve(env.close())
    resolve(env.close())
    assert running and inner.released == ended + running and inner.stopped == 1 and env.serving.done()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_unsupported_environments_are_user_errors(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"verifiers:no-such-thing could not be loaded: .*no-such-thing"):
        make_env("verifiers:no-such-thing")
    with pytest.raises(UserError, match="the agents assistant, user: only"):
        load(SINGLE, id="user-sim")
    env = load("    import asyncio\n" + SINGLE + TWICE)
    ((_, _, _, _, info),) = play(env, env.prompts("train")[0], "1")
    assert info["verdict"].status is Status.ERROR and "runs its agent more than once" in info["verdict"].detail
    with pytest.raises(UserError, match=r"cannot be started: .*container"):
        load(SINGLE.replace("@vf.metric", "NEEDS_CONTAINER = True"))
    import verifiers

    monkeypatch.setattr(verifiers, "load_environment", None, raising=False)
    with pytest.raises(UserError, match=r"is not supported: pip install 'verifiers>=0\.4'"):
        make_env("verifiers:wordle")


@pytest.mark.slow
@pytest.mark.parametrize("source", [MULTI, TOOLS])
def test_training_on_environments_of_verifiers(load: Any, source: str, tmp_path: Path) -> None:
    settings = {
        "model.source": "preset:pico",
        "model.tokenizer": "characters",
        "model.max_length": 1024,
        "env.name": load(source).name,
        "env.max_tokens": 6,
        "sampling.max_new_tokens": 24,
        "train.steps": 2,
        "train.prompts": 2,
        "train.samples": 4,
        "eval.examples": 2,
        "eval.final_examples": 2,
        "runs_dir": tmp_path / "runs",
        "name": "vf",
    }
    (tmp_path / "empty.toml").write_text("")
    given = ["train", str(tmp_path / "empty.toml")]
    assert main([*given, *(str(word) for key, value in settings.items() for word in (f"--{key}", value))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs" / "vf" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2 and not any(row.get("status/error") for row in steps)
