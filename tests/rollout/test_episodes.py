"""Episodes: exact tokens and masks, limits, seeds, log-probabilities equal to the trainer's, closing environments."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from assay.engine import make_engine
from assay.engine.base import SamplingParams
from assay.envs import Env, make_env
from assay.models import build_preset
from assay.models.logprobs import token_logprobs
from assay.rewards import JudgePool
from assay.rollout import Collector, Limits
from assay.rollout.episodes import check_history
from assay.tasks import make_task
from assay.text import Renderer, char_tokenizer, word_tokenizer
from assay.training.learner.pack import Row, pack
from assay.types import Finish, Group, Rollout, Status, UserError

PARAMS = SamplingParams(n=3, temperature=1.0, max_new_tokens=40)


def guess(**args: Any) -> Any:
    return make_env("guess", **{"high": 6, "tries": 4, **args})


def stepwise(**args: Any) -> Any:
    env: Any = make_env("stepwise", task=make_task("abacus"), separator=";", **args)
    env.defer_judging = True
    return env


def collector(
    env: Env, limits: Limits | None = None, dtype: torch.dtype = torch.float32, length: int = 160, words: bool = True
) -> Collector:
    tokenizer = word_tokenizer(env.words()) if words else char_tokenizer()  # type: ignore[attr-defined]
    policy = build_preset("nano", tokenizer.vocab_size, length, seed=3).to(dtype)
    renderer = Renderer(tokenizer)
    engine = make_engine("native", policy, device="cpu", dtype=dtype, max_length=length, decode=renderer.decode)
    part = Collector(engine, renderer, JudgePool(env.judge(), 0, 5.0), env=env, limits=limits or Limits(step_tokens=4))
    part.policy = policy  # type: ignore[attr-defined]
    return part


def rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def idle(part: Collector) -> bool:
    engine: Any = part.engine
    return not engine.scheduler.kept


def test_episode_tokens_and_loss_mask_equal_a_replay() -> None:
    part = collector(guess())
    found = rollouts(part.collect(guess().prompts("train")[:6], PARAMS, (0, 0)))
    assert len({len(rollout.turns) for rollout in found}) > 1  # episodes have different numbers of turns
    renderer = part.renderer
    for rollout in found:
        env = guess()
        env.start(rollout.prompt)
        expected, mask = renderer.prompt_ids(rollout.prompt), [0] * len(renderer.prompt_ids(rollout.prompt))
        for place, turn in enumerate(rollout.turns):
            sampled = turn.completion.token_ids
            expected, mask = expected + sampled, mask + [1] * len(sampled)
            observation, reward, over, _, _ = env.step(turn.text)
            assert turn.reward == reward and over == (place == len(rollout.turns) - 1)
            if not over:
                message = [{"role": "user", "content": observation}]
                given = renderer.next_turn_ids(rollout.prompt, sampled, message)  # type: ignore[arg-type]
                expected, mask = expected + given, mask + [0] * len(given)
        assert rollout.token_ids == expected and rollout.loss_mask == mask
        assert rollout.verdict and rollout.reward == rollout.verdict.reward == sum(t.reward for t in rollout.turns)
    assert {r.verdict.status for r in found if r.verdict} >= {Status.OK, Status.WRONG}
    assert idle(part)


def test_stepwise_episode_is_one_reply_in_several_turns() -> None:
    part = collector(stepwise(max_lines=3), Limits(step_tokens=12))
    found = rollouts(part.collect(make_task("abacus").prompts("train")[:12], PARAMS, (0, 0)))
    several = [rollout for rollout in found if len(rollout.turns) > 1]
    assert several
    for rollout in several:
        for last, turn in pairwise(rollout.turns):
            assert turn.context_ids == [] and ";" in last.text
        written = [token for turn in rollout.turns for token in turn.completion.token_ids]
        assert rollout.text == part.renderer.decode(written)
    assert all(rollout.verdict and rollout.verdict.status is not Status.ERROR for rollout in found)


def test_tool_results_have_loss_mask_0() -> None:
    """The policy can only write << 1 + 1 = , so its tool calls get results."""
    task = make_task("abacus", max_value=15)
    env: Any = make_env("calculator", task=task)
    env.defer_judging = True
    part = collector(env, Limits(steps=3, step_tokens=30))
    encode = part.renderer.tokenizer.encode
    allowed = set(encode("<< 1 + ="))
    forbidden = tuple(i for i in range(part.renderer.tokenizer.vocab_size) if i not in allowed)
    params = SamplingParams(n=8, max_new_tokens=90, forbidden_token_ids=forbidden)
    found = rollouts(part.collect(task.prompts("train")[:4], params, (0, 0)))
    answered = [(r, i) for r in found for i, turn in enumerate(r.turns) if i and turn.context_ids]
    assert answered
    decode = part.renderer.decode
    for rollout in found:  # the text of a rollout is its whole reply, with the results
        ids = rollout.token_ids[len(rollout.turns[0].context_ids) :]
        assert rollout.text == decode(ids)
    for rollout, place in answered:
        assert rollout.turns[place].inserted.strip() == decode(rollout.turns[place].context_ids)
        result = part.renderer.tokenizer.decode(rollout.turns[place].context_ids)
        assert result.endswith(">>") or "error" in result
        start = sum(len(t.context_ids) + len(t.completion.token_ids) for t in rollout.turns[:place])
        size = len(rollout.turns[place].context_ids)
        assert rollout.loss_mask[start : start + size] == [0] * size
        assert all(rollout.loss_mask[start + size : start + size + 1])


@pytest.mark.parametrize("kind", ["guess", "stepwise"])
def test_trainer_logprobs_of_episodes_equal_engine_logprobs(kind: str) -> None:
    env = guess() if kind == "guess" else stepwise()
    part = collector(env, Limits(step_tokens=4 if kind == "guess" else 40), dtype=torch.float64)
    found = rollouts(part.collect(env.prompts("train")[:12], PARAMS, (1, 2)))
    several = [rollout for rollout in found if len(rollout.turns) > 1]
    assert len(several) > 2
    batch = pack([Row.of(rollout) for rollout in several], "cpu", torch.float64)
    policy = part.policy  # type: ignore[attr-defined]
    with torch.no_grad():
        trainer = token_logprobs(policy, batch.ids, batch.lengths, batch.trained, 1.0, shared=batch.shared)[0]
    assert trainer.shape == batch.behaviour_logprobs.shape
    assert float((trainer - batch.behaviour_logprobs).abs().max()) < 1e-9


def test_episodes_do_not_depend_on_other_episodes() -> None:
    part = collector(guess())
    prompts = guess().prompts("train")[:6]
    together = part.collect(prompts, PARAMS, (5, 2))
    alone = part.collect([prompts[4]], PARAMS, (5, 2))[0]
    assert [r.token_ids for r in alone.rollouts] == [r.token_ids for r in together[4].rollouts]
    other = part.collect([prompts[4]], PARAMS, (5, 3))[0]
    assert [r.token_ids for r in alone.rollouts] != [r.token_ids for r in other.rollouts]
    long = [r for r in rollouts(together) if len(r.turns) > 1]
    second = [tuple(r.turns[1].completion.token_ids) for r in long]
    assert len(set(second)) > len(second) // 2  # samples do not share noise in later turns


class Endless(Env):
    """Never terminates."""

    name = "endless"
    max_steps = 50

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"begin {seed}", {}

    def step(self, action: str) -> Any:
        return "more", 0.5, False, False, {}


@pytest.mark.parametrize(
    ("limits", "tokens", "length", "reason"),
    [
        (Limits(steps=3, step_tokens=2), 100, 200, "3 steps"),
        (Limits(step_tokens=4), 10, 200, "10 tokens"),
        (Limits(step_tokens=4), 300, 60, "context of 60"),
        (Limits(step_tokens=2, seconds=1e-9), 300, 400, "1e-09 s"),
    ],
)
def test_limits_truncate_episodes(limits: Limits, tokens: int, length: int, reason: str) -> None:
    part = collector(Endless(), limits, length=length, words=False)
    params = replace(PARAMS, max_new_tokens=tokens)
    for rollout in rollouts(part.collect(Endless().prompts("train")[:3], params, (0, 0))):
        assert rollout.truncated and rollout.cut_off and rollout.verdict
        assert rollout.verdict.status is Status.NO_ANSWER and reason in rollout.verdict.detail
        assert rollout.reward == 0.5 * len(rollout.turns) == sum(turn.reward for turn in rollout.turns)
        assert rollout.length <= tokens and len(rollout.token_ids) <= length
        assert all(len(turn.completion.token_ids) <= limits.step_tokens for turn in rollout.turns)
        said: Any = [{"role": "user", "content": "more"}]
        written = rollout.turns[-1].completion.token_ids
        assert rollout.bootstrap_ids == part.renderer.next_turn_ids(rollout.prompt, written, said)
    assert idle(part)


@pytest.mark.parametrize(("over", "following"), [("terminated", False), ("truncated", True), ("silently", False)])
def test_bootstrap_ids_are_set_for_truncated_episodes(over: str, following: bool) -> None:
    class Ending(Endless):
        def step(self, action: str) -> Any:
            said = "" if over == "silently" else "good bye"
            return said, 0.5, over == "terminated", over != "terminated", {}

    part = collector(Ending(), words=False)
    said: Any = [{"role": "user", "content": "good bye"}]
    for rollout in rollouts(part.collect(Ending().prompts("train")[:2], PARAMS, (0, 0))):
        written = rollout.turns[-1].completion.token_ids
        expected = part.renderer.next_turn_ids(rollout.prompt, written, said) if following else None
        assert rollout.cut_off == (over != "terminated") and rollout.bootstrap_ids == expected


def test_action_token_limit_does_not_truncate_the_episode() -> None:
    part = collector(guess(tries=3), Limits(step_tokens=2))
    found = rollouts(part.collect(guess(tries=3).prompts("train")[:8], replace(PARAMS, max_new_tokens=6), (0, 0)))
    ended = [r for r in found if r.turns[-1].completion.finish is Finish.ACTION]
    assert ended and all(r.verdict and not r.cut_off and not r.truncated for r in ended)
    assert {r.turns[-1].completion.finish for r in found} <= {Finish.ACTION, Finish.STOP}
    short = rollouts(part.collect(guess(tries=3).prompts("train")[:8], replace(PARAMS, max_new_tokens=5), (0, 0)))
    cut = [r for r in short if len(r.turns) == 3 and r.length == 5 and r.turns[-1].completion.finish is Finish.LENGTH]
    assert cut and all(r.truncated for r in cut)  # the token limit of the episode ended its last action
    line = collector(stepwise(), Limits(step_tokens=2))
    lines = rollouts(line.collect(stepwise().prompts("train")[:4], PARAMS, (0, 0)))
    assert any(r.truncated for r in lines)  # a reply that did not end


def test_single_step_environment_equals_the_task() -> None:
    """A task and the same task as an environment give the same tokens and verdicts."""
    task: Any = make_task("abacus")
    env: Any = make_env("single", task=task)
    env.defer_judging = True
    part = collector(env, Limits())
    prompts = task.prompts("test")[:5]
    played = part.collect(prompts, replace(PARAMS, max_new_tokens=8), (3, 1))
    part.env = None
    answered = part.collect(prompts, replace(PARAMS, max_new_tokens=8), (3, 1))
    for one, other in zip(rollouts(played), rollouts(answered), strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text and one.verdict == other.verdict
        assert one.turns[0].completion.finish in (Finish.STOP, Finish.LENGTH) and one.reward == one.turns[0].reward


def test_check_history_warns_about_templates_that_rewrite_replies() -> None:
    tokenizer = char_tokenizer()
    tokenizer.hf.chat_template = (
        "{% for m in messages %}<user>{{ m['content'].split('</think>')[-1] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<user>{% endif %}"
    )
    renderer, env = Renderer(tokenizer), guess()
    assert "drops <think> sections" in check_history(renderer, env, env.prompts("train")[0])
    inline = stepwise()
    assert check_history(renderer, inline, inline.prompts("train")[0]) == ""
    assert check_history(Renderer(char_tokenizer()), env, env.prompts("train")[0]) == ""


class Resource(Endless):
    """Counts the copies that exist and the calls of `close`."""

    max_steps = 3

    def __init__(self) -> None:
        self.closed: list[Resource] = []
        self.copies: weakref.WeakSet[Resource] = weakref.WeakSet()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.copies.add(self)
        return super().reset(seed=seed, options=options)

    def close(self) -> None:
        self.closed.append(self)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, UserError])
def test_collector_closes_its_environment_also_after_errors(error: type[BaseException] | None) -> None:
    class Failing(Resource):
        def step_all(self, episodes: Any, actions: Any) -> Any:
            if error:
                raise error
            return super().step_all(episodes, actions)

    env = Failing()
    with nullcontext() if error is None else pytest.raises(error), collector(env, words=False) as part:
        part.collect(env.prompts("train")[:2], PARAMS, (0, 0))
        assert not env.closed
    assert env.closed == [env]
    with pytest.raises(RuntimeError, match="closed"):
        part.judge.judge([("", "", {})])


def test_environment_copies_are_deleted_when_their_episodes_end() -> None:
    class Short(Resource):
        """Every second episode ends after one step; then its copy must not exist any more."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.short, self.steps = (seed or 0) % 2 == 0, 0
            return super().reset(seed=seed, options=options)

        def step(self, action: str) -> Any:
            self.steps += 1
            if self.steps == 2:
                alive.append(sum(copy.short for copy in self.copies))
            return "more", 0.0, self.short, False, {}

    alive: list[int] = []
    env = Short()
    part = collector(env, words=False)
    prompts = env.prompts("train")[:8]
    assert {prompt.fields["episode_seed"] % 2 for prompt in prompts} == {0, 1}
    part.collect(prompts, PARAMS, (0, 0))
    assert alive and alive[-1] == 0
    gc.collect()
    assert not env.copies
