from __future__ import annotations

import random

import pytest
from envs.sample_env import build

from assay.envs.base import SEED
from assay.types import Status, UserError


def test_guess_a_number() -> None:
    env = build("guess", low=1, high=7, tries=3)
    for prompt in env.prompts("test")[:20]:
        env.start(prompt)
        assert 1 <= env.secret <= 7 and random.Random(prompt.fields[SEED]).randint(1, 7) == env.secret
    env.secret = 6
    assert env.step("4")[:4] == ("Higher .", 0.0, False, False)
    assert env.step("the 7")[:4] == ("Lower .", 0.0, False, False)
    observation, reward, terminated, _, info = env.step("no idea")
    assert (observation, reward, terminated, info["verdict"].status) == ("Lost .", 0.0, True, Status.NO_ANSWER)
    words = set(env.words())
    assert all(set(m["content"].split()) <= words for p in env.prompts("train")[:5] for m in p.messages)


def test_countdown_tries_gives_feedback_and_decays_the_reward() -> None:
    env = build("countdown_tries", tries=3, decay=0.5)
    env.reset(seed=2)
    nums = env.prompt.fields["nums"]
    observation, reward, terminated, _, _ = env.step(f"<answer>{nums[0]} + {nums[0]}</answer>")
    assert "uses the numbers" in str(observation) and "2 tries left" in str(observation) and not terminated
    _, reward, terminated, _, info = env.step(env.gold_action())
    assert (reward, terminated) == (0.5, True) and info["verdict"].correct
    with pytest.raises(UserError, match="must be Countdown"):
        build("countdown_tries", task="abacus")
