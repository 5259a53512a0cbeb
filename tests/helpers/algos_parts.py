"""Hand-made groups of rollouts, for tests of algorithms."""

from __future__ import annotations

from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def make_group(name: str, samples: list[tuple[float, int]], limit: int = 10) -> Group:
    """Samples are (verdict's reward, tokens); those that reach the limit were cut off."""
    prompt = Prompt(id=name, messages=())
    rollouts = []
    for index, (reward, length) in enumerate(samples):
        finish = Finish.LENGTH if length >= limit else Finish.STOP
        completion = Completion([0] * length, [-1.0] * length, [-1.0] * length, finish)
        verdict = Verdict(reward, Status.OK if reward > 0 else Status.WRONG)
        rollouts.append(Rollout(prompt, index, [Turn([1, 2], completion, "")], verdict, reward))
    return Group(prompt, rollouts)
