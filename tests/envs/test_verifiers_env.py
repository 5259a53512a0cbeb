"""Environments of the package verifiers, with its real classes: single-turn, multi-turn and tools."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from assay.envs import make_env
from assay.envs.base import Env
from assay.envs.check import check_env
from assay.rewards import importing
from assay.tasks import make_task
from assay.types import Status, UserError


def test_without_verifiers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"verifiers:wordle.*\[verifiers\]"):
        make_env("verifiers:wordle")


def test_settings_of_a_run_cannot_load_an_environment_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise UserError(f"no consent to {path}")

    monkeypatch.setattr(importing, "guard", refuse)
    with pytest.raises(UserError, match="no consent to verifiers:wordle"):
        make_env("verifiers:wordle")


def test_a_task_cannot_be_an_environment() -> None:
    with pytest.raises(UserError, match=r"set env\.name"):
        make_task("verifiers:wordle")
    with pytest.raises(UserError, match="has its own problems"):
        make_env("verifiers:wordle", task=make_task("abacus"))


SINGLE = """
    import verifiers as vf
    from datasets import Dataset

    def load_environment(count=20, fail_on="", evaluation=True):
        rows = [{"question": f"echo {n}", "answer": str(n), "info": {"parity": n % 2}} for n in range(count + 4)]

        async def exact(completion, answer, **kwargs):
            text = completion[-1]["content"]
            if fail_on and fail_on in text:
                raise ValueError("cannot read this answer")
            return float(text.strip() == answer)

        def short(parser, completion):
            return len(parser.parse_answer(completion)) < 5

        return vf.SingleTurnEnv(
            dataset=Dataset.from_list(rows[:count]),
            eval_dataset=Dataset.from_list(rows[count:]) if evaluation else None,
            system_prompt="Be brief .",
            few_shot=[{"role": "user", "content": "echo 99"}, {"role": "assistant", "content": "99"}],
            rubric=vf.Rubric(funcs=[exact, short], weights=[1.0, 0.25]),
        )
"""

MULTI = """
    import asyncio
    import verifiers as vf
    from datasets import Dataset

    class Countdown(vf.MultiTurnEnv):
        released = 0

        async def setup_state(self, state):
            state["left"] = state["info"]["start"]
            return state

        @vf.stop
        async def at_zero(self, state):
            return state["left"] <= 0

        async def env_response(self, messages, state, **kwargs):
            said = messages[-1]["content"].strip()
            if said == "crash":
                raise vf.ToolError("the line is down")
            if said == "bug":
                raise RuntimeError("not an error of verifiers")
            await asyncio.sleep(0)
            state["left"] -= 1 if said == str(state["left"]) else 0
            if state["left"] <= 0:
                state["final_env_response"] = [{"role": "user", "content": "done"}]
                return state["final_env_response"]
            return [{"role": "user", "content": f"{state['left']} left"}]

        @vf.cleanup
        async def release(self, state):
            type(self).released += 1

        @vf.teardown
        async def shut(self):
            self.shut_down = getattr(self, "shut_down", 0) + 1

    async def counted(state):
        return 1.0 - state["left"] / state["info"]["start"]

    def load_environment(max_turns=6):
        rows = [{"question": f"game {n} : count from {n % 3 + 1}", "info": {"start": n % 3 + 1}} for n in range(30)]
        return Countdown(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[counted]), max_turns=max_turns)
"""

TOOLS = """
    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        '''Add two numbers.'''
        return a + b

    def load_environment():
        rows = [{"question": f"{n} + 1 ?", "answer": str(n + 1)} for n in range(30)]
        exact = lambda completion, answer: float(completion[-1]["content"].strip() == answer)
        return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[exact]), max_turns=4)
"""

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 1}}\n</tool_call>'


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Env] = []

    def make(source: str, **args: Any) -> Env:
        name = f"vf_env_{abs(hash((source, str(tmp_path)))) % 10**8}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        made.append(make_env(f"verifiers:{name.replace('_', '-')}", **args))
        return made[-1]

    yield make
    for env in made:
        env.close()


def play(env: Env, prompt: Any, *actions: str) -> list[Any]:
    episode = env.copy()
    episode.start(prompt)
    return env.step_all([episode], actions[:1]) + [episode.step(action) for action in actions[1:]]


def test_single_turn_rows_become_prompts_and_the_rubric_judges(load: Any) -> None:
    env = load(SINGLE)
    prompt = env.prompts("test")[3]
    assert [(m["role"], m["content"]) for m in prompt.messages] == [
        ("system", "Be brief ."),
        ("user", "echo 99"),
        ("assistant", "99"),
        ("user", "echo 23"),
    ]
    assert (prompt.answer, env.max_steps, len(env.prompts("test")), len(env.prompts("train"))) == ("23", 1, 4, 18)
    ((_, reward, terminated, _, info),) = play(env, prompt, " 23")
    assert (reward, terminated, info["verdict"].status) == (1.25, True, Status.OK)
    assert info["verdict"].parts == {"exact": 1.0, "short": 1.0, "num_turns": 1.0}
    ((_, reward, _, _, info),) = play(env, prompt, "it is 23")
    assert (reward, info["verdict"].status) == (0.0, Status.WRONG)


def test_without_evaluation_dataset_the_rows_are_split(load: Any) -> None:
    env = load(SINGLE, evaluation=False, count=40)
    ids = [{prompt.question for prompt in env.prompts(split)} for split in ("train", "validation", "test")]
    assert [len(one) for one in ids] == [32, 4, 4] and len(set.union(*ids)) == 40


def test_a_reward_function_that_raises_is_a_status(load: Any) -> None:
    env = load(SINGLE, fail_on="?")
    ((_, reward, terminated, _, info),) = play(env, env.prompts("train")[0], "what ?")
    verdict = info["verdict"]
    assert (reward, terminated, verdict.status) == (0.0, True, Status.ERROR)
    assert "the reward function exact: ValueError: cannot read this answer" in verdict.detail


def test_multi_turn_states_are_separate_and_stop_conditions_end_episodes(load: Any) -> None:
    env = load(MULTI)
    by_start = {prompt.question[-1]: prompt for prompt in env.prompts("train")}
    first, second = env.copy(), env.copy()
    first.start(by_start["2"])
    second.start(by_start["3"])
    ((shown, *_), (other, *_)) = env.step_all([first, second], ["2", "wrong"])
    assert shown == [{"role": "user", "content": "1 left"}] and other == [{"role": "user", "content": "3 left"}]
    _, reward, terminated, _, info = first.step("1")
    assert (reward, terminated, info["verdict"].status) == (1.0, True, Status.OK)
    for _ in range(4):
        assert not second.step("wrong")[2]
    _, reward, terminated, _, info = second.step("3")  # the sixth turn: max_turns
    assert (reward, terminated, info["verdict"].status) == (0.0, True, Status.WRONG)
    assert env.max_steps == 6


def test_errors_of_the_environment_are_statuses(load: Any) -> None:
    env = load(MULTI)
    prompt = env.prompts("train")[0]
    for action, detail in (("crash", "the line is down"), ("bug", "not an error of verifiers")):
        ((_, reward, terminated, _, info),) = play(env, prompt, action)
        assert (reward, terminated, info["verdict"].status) == (0.0, True, Status.ERROR)
        assert detail in info["verdict"].detail


def test_tools_are_described_in_the_prompt_and_called_from_text(load: Any) -> None:
    env = load(TOOLS)
    prompt = next(prompt for prompt in env.prompts("all") if prompt.question.startswith("3 "))
    assert prompt.messages[0]["role"] == "system" and '"name": "add"' in prompt.messages[0]["content"]
    called, answered = play(env, prompt, CALL, "4")
    assert called[0] == [{"role": "tool", "content": "4"}] and not called[2]
    assert (answered[1], answered[2], answered[4]["verdict"].parts["add_calls"]) == (1.0, True, 1.0)
    failed, _ = play(env, prompt, CALL.replace('"add"', '"no"'), "4")
    assert failed[0][0]["role"] == "tool"
    invalid, _ = play(env, prompt, "<tool_call>{oops</tool_call>", "4")
    assert invalid[0][0]["role"] == "tool"


@pytest.mark.parametrize("source", [SINGLE, MULTI, TOOLS])
def test_check_env_finds_only_that_there_is_no_gold_policy(load: Any, source: str) -> None:
    problems = [finding.what for finding in check_env(load(source), episodes=3) if not finding.ok]
    assert problems == ["a perfect policy reaches max_return"]


def test_a_loader_by_path_signal_handlers_and_close(load: Any, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MULTI))
    env = make_env(f"{tmp_path / 'mine.py'}:load_environment", max_turns=3)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert env.max_steps == 3
    episode = env.copy()
    episode.start(env.prompts("train")[0])
    inner: Any = env.env  # type: ignore[attr-defined]
    env.close()
    env.close()
    # Released: the episode that was under way, and the one that `prompts` starts to see the first messages.
    assert type(inner).released == 2 and inner.shut_down == 1
    assert not env.loop.running  # type: ignore[attr-defined]


def test_unknown_environments_and_group_rewards(load: Any) -> None:
    with pytest.raises(UserError, match=r"verifiers:no-such-thing could not be loaded: .*no-such-thing"):
        make_env("verifiers:no-such-thing")
    with pytest.raises(UserError, match="compare answers"):
        load(
            """
            import verifiers as vf
            from datasets import Dataset

            def best(completions):
                return [1.0 for _ in completions]

            def load_environment():
                rows = Dataset.from_list([{"question": "a", "answer": "b"}])
                return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best]))
            """
        )


@pytest.mark.slow
@pytest.mark.parametrize("source", [SINGLE, MULTI, TOOLS])
def test_training_on_environments_of_verifiers(load: Any, source: str, tmp_path: Path) -> None:
    import json

    from assay.cli.main import main

    (tmp_path / "trained.py").write_text(textwrap.dedent(source))
    settings = {
        "model.source": "preset:pico",
        "model.tokenizer": "characters",
        "model.max_length": 1024,
        "env.name": f"{tmp_path / 'trained.py'}:load_environment",
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
