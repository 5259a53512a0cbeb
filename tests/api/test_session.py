"""Custom loops: the standard loop, written with the API, gives the same run to the last bit."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns

from assay import Trainer, session
from assay.runs import read_rollouts
from assay.training.sources import mixed
from assay.types import Group, UserError

ROOT = Path(__file__).resolve().parents[2]
REPLAY: dict[str, Any] = {"replay.capacity": 5, "train.steps": 4, "save.every": 2, "eval.every": 2}


class Stop(Exception):
    pass


class Classic(Trainer):
    stop_at = 99

    def train(self) -> None:
        while self.step < self.steps:
            if self.step == self.stop_at:
                raise Stop
            groups = self.sample()
            self.credit(groups)
            batch = mixed(groups, self.buffer.sample(2, version=self.step, seed=self.seed))
            self.buffer.add(groups)
            self.record(groups, self.update(batch))


def test_a_custom_loop_equals_the_command_line_and_resumes_exactly(small: SmallRuns) -> None:
    settings = {**REPLAY, "runs_dir": str(small.runs)}
    words = [str(word) for key, value in REPLAY.items() for word in (f"--{key}", value)]
    assert small.train(*words, "--replay.groups", 2) == 0
    summary = Classic(small.config, {**settings, "name": "own"}, quiet=True).run()
    assert summary["steps"] == 4 and summary == small.summary("own")
    stopped = Classic(small.config, {**settings, "name": "stopped"}, quiet=True)
    stopped.stop_at = 3
    with pytest.raises(Stop):
        stopped.run()
    again = Classic(resume="stopped", settings={"runs_dir": str(small.runs)}, quiet=True)
    assert again.step == 2 and len(again.buffer) == 5
    again.run()
    small.same_run("own", "stopped", 4)
    for step in range(1, 5):
        assert read_rollouts(small.runs / "own", step) == read_rollouts(small.runs / "small", step)
    ours = [{k: v for k, v in row.items() if not k.startswith("replay/")} for row in small.timeless("small")]
    assert small.timeless("own") == ours


class Single(Trainer):
    """Answers are sampled one by one."""

    def train(self) -> None:
        for _ in range(2):
            groups = []
            for state in self.states(2):
                actions = [self.policy.get_action(state) for _ in range(3)]
                self.judge(actions)
                groups.append(Group(state, actions))
            self.credit(groups)
            self.record(groups, self.update(groups))


def test_actions_are_sampled_one_by_one(small: SmallRuns) -> None:
    trainer = Single(small.config, {"runs_dir": str(small.runs), "train.steps": 9}, quiet=True)
    summary = trainer.run()
    assert summary["steps"] == 2 and small.checkpoint(2).exists()  # it ended before `steps`
    first, second = (read_rollouts(small.runs / "small", step) for step in (1, 2))
    assert {group.prompt.id for group in first}.isdisjoint(group.prompt.id for group in second)
    for version, groups in enumerate((first, second)):
        for group in groups:
            assert len({rollout.text for rollout in group.rollouts}) == 3  # other noise each time
            assert {r.turns[0].completion.version for r in group.rollouts} == {version}
            assert all(r.verdict and r.reward == sum(map(ord, r.text)) % 4 / 3 for r in group.rollouts)
    assert sum(row.get("optim/grad_norm", 0) > 0 for row in small.metrics()) == 2
    policy = trainer.policy
    greedy = {policy.get_action("2 + 2 =", greedy=True).text for _ in range(3)}
    spoken = policy.get_action([{"role": "user", "content": "2 + 2 ="}], greedy=True)
    assert greedy == {spoken.text} and policy.version == 2


def test_replay_without_ratio_changed_settings_and_several_processes_are_refused(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"runs_dir": str(small.runs)}
    stale = Classic(small.config, {**settings, "algo.recipe": "reinforce"}, quiet=True)
    with pytest.raises(UserError, match="cannot be replayed"):
        stale.run()
    with pytest.raises(UserError, match=r"another task\.args"):
        Classic(resume="small", settings={**settings, "task.args.max_steps": 9})
    with pytest.raises(TypeError, match="abstract"):
        Trainer(small.config, settings)  # type: ignore[abstract]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process"):
        Classic(small.config, settings)


def test_example_classic_loop_steps_an_environment(tmp_path: Path, no_curves: None) -> None:
    example = runpy.run_path(str(ROOT / "examples" / "classic_loop.py"))
    short = {"train.steps": 2, "eval.final_examples": 20, "eval.examples": 5, "runs_dir": str(tmp_path)}
    trainer = example["Classic"](settings={**example["SETTINGS"], **short}, quiet=True)
    assert trainer.run()["steps"] == 2
    groups = read_rollouts(trainer.training.directory.path, 1)
    actions = [rollout for group in groups for rollout in group.rollouts]
    shortest = min(len(action.turns[0].context_ids) for action in actions)
    assert 16 <= len(actions) <= 32 and {action.length for action in actions} == {1}  # one or two tries of a token
    first, second = ([a for a in actions if (len(a.turns[0].context_ids) > shortest) == later] for later in (0, 1))
    assert len(first) == 16 and second
    for action in second:  # its context is an earlier action with all its tokens, and the observation
        before = [a.token_ids for a in first if a.prompt == action.prompt]
        assert any(action.token_ids[: len(ids)] == ids for ids in before)
    assert {round(action.reward, 9) for action in actions} <= {0.0, 0.9, 1.0}
    assert len((ROOT / "examples" / "classic_loop.py").read_text().splitlines()) <= 40


class Lines(Trainer):
    def train(self) -> None:
        pass


def test_an_action_ends_at_the_limits_of_the_environment(small: SmallRuns) -> None:
    words = {"runs_dir": str(small.runs), "sampling.max_new_tokens": 60, "env.max_tokens": 9}
    trainer = Lines(small.config, {**words, "env": "stepwise", "env.args.separator": ";"}, quiet=True)
    state = trainer.states(1)[0]
    texts = [trainer.policy.get_action(state) for _ in range(60)]
    assert max(action.length for action in texts) == 9
    assert any(";" in action.text for action in texts)
    assert all(";" not in action.text[:-1] for action in texts)
    single = Lines(small.config, {**words, "env": "single", "name": "one"}, quiet=True).env()
    single.start(state)
    assert "verdict" in single.step("no idea")[4]  # it does not wait for a run's judge
    with pytest.raises(UserError, match="has no environment"):
        Lines(small.config, {"runs_dir": str(small.runs), "name": "two"}, quiet=True).env()


class Lined(Trainer):
    """The classic loop in an environment that continues within a reply."""

    def train(self) -> None:
        env = self.env()
        while self.step < self.steps:
            groups = []
            for state in self.states(4):
                env.start(state)
                observation, action, reply, over = state, None, "", False
                while not over:
                    action = self.policy.get_action(observation, after=action)
                    observation, reward, terminated, truncated, _ = env.step(action.text)
                    over, reply = terminated or truncated, reply + action.text + observation
                    self.reward(action, reward + action.text.count("1"))
                    groups.append(Group(state, [action]))
                    assert over or env.reply == reply
            full = self.policy.get_action("4" * 80, after=action)  # the reply has no space left
            self.reward(full, 0.0)
            groups.append(Group(state, [full]))
            self.credit(groups)
            self.record(groups, self.update(groups))


def test_a_custom_loop_trains_in_an_environment_that_continues_within_a_reply(small: SmallRuns) -> None:
    settings = {
        "model.tokenizer": "characters",
        "task.args": {"style": "plain", "train_size": 24, "eval_size": 10},
        "env": {"name": "stepwise", "args": {"calculator": True}, "max_tokens": 12},
        "sampling.max_new_tokens": 80,
        "algo.recipe": "reinforce",
        "reward.function": "",
        "runs_dir": str(small.runs),
    }
    trainer = Lined(small.config, settings, quiet=True)
    assert trainer.run()["steps"] == 2
    assert all(row["optim/grad_norm"] > 0 for row in small.metrics() if "optim/grad_norm" in row)
    decode = trainer.training.collector.renderer.decode
    followed, groups = 0, read_rollouts(small.runs / "small", 1)
    assert groups[-1].rollouts[0].length == 0
    for group in groups:
        (action,) = group.rollouts
        (turn,) = action.turns
        assert action.loss_mask == [0] * len(turn.context_ids) + [1] * action.length and action.length <= 12
        assert not any(stop in action.text[:-1] for stop in "\n=")
        followed += decode(turn.context_ids)[-1:] in ("\n", "=")
    assert followed
    state, policy = trainer.states(1)[0], trainer.policy
    first = policy.get_action(state)
    second = policy.get_action("4>>", after=first)
    context = second.turns[0].context_ids
    assert context[: len(first.token_ids)] == first.token_ids and decode(context[len(first.token_ids) :]) == "4>>"
    with pytest.raises(UserError, match="what its step returned"):
        policy.get_action(state, after=first)


def test_invalid_states_and_empty_steps_are_refused(small: SmallRuns) -> None:
    trainer = Lines(small.config, {"runs_dir": str(small.runs)}, quiet=True)
    for state in (5, [], [{"role": "user"}], {"role": "user", "content": "2 + 2 ="}):
        with pytest.raises(UserError, match="a state must be a question"):
            trainer.policy.get_action(state)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no space in a context") as error:
        trainer.policy.get_action("has " * 900)
    assert len(str(error.value)) < 500
    with pytest.raises(UserError, match="given no groups"):
        trainer.record([], {})


def test_credit_requires_a_verdict(small: SmallRuns) -> None:
    trainer = Lines(small.config, {"runs_dir": str(small.runs), "algo.recipe": "reinforce"}, quiet=True)
    state = trainer.states(1)[0]
    groups = [Group(state, [trainer.policy.get_action(state)]) for _ in range(2)]
    with pytest.raises(UserError, match=r"call judge\(answers\), or reward"):
        trainer.credit(groups)
    for group, value in zip(groups, (0.25, 0.75), strict=True):
        trainer.reward(group.rollouts[0], value)
    trainer.credit(groups)
    assert [r.advantage for group in groups for r in group.rollouts] == [-0.25, 0.25]
    groups[0].rollouts[0].turns[0].completion.version = 7  # of another run, further on than this one
    with pytest.raises(UserError, match="cannot be replayed"):
        trainer.update(groups)


ENDLESS = """
from assay.envs import Env

class Endless(Env):
    max_steps = 3

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return "Guess .", {}

    def step(self, action):
        self.count += 1
        return "No .", 0.0, False, False, {}

    def words(self):
        return ["Guess", "No", "."]
"""


@pytest.mark.parametrize(("max_steps", "limit"), [(0, 3), (5, 5)])
def test_env_truncates_episodes_after_max_steps(small: SmallRuns, max_steps: int, limit: int) -> None:
    (small.folder / "endless.py").write_text(ENDLESS)
    env = {"name": f"{small.folder}/endless.py:Endless", "max_steps": max_steps, "max_tokens": 1}
    settings = {"runs_dir": str(small.runs), "task": "", "env": env, "reward.function": ""}
    stepped = Lines(small.config, settings, quiet=True).env()
    for _ in range(2):
        stepped.reset(seed=1)
        truncated = [stepped.step("No")[3] for _ in range(limit)]
        assert truncated == [False] * (limit - 1) + [True] and stepped.count == limit


@pytest.mark.slow
def test_example_own_loop_trains_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> None:
    monkeypatch.chdir(ROOT)
    example = runpy.run_path("examples/own_loop.py")
    short = {"sft.steps": 20, "eval.final_examples": 20, "eval.examples": 5}
    settings = {**example["SETTINGS"], "steps": 3, "runs_dir": str(tmp_path), "quiet": True}
    with session(**{**settings, **short}) as trained:
        example["train"](trained)
    assert trained.summary["steps"] == 3 and trained.summary["after"]["n"] == 20
    assert len(trained.buffer) == 48 and "version 2: 16 groups" in trained.buffer.summary(3)
    assert len((ROOT / "examples" / "own_loop.py").read_text().splitlines()) <= 40
