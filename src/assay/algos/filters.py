"""What to leave out, or to discourage, before credit is given. All of these read what the judge and the engine said."""

from __future__ import annotations

from assay.types import Group, Rollout


def verdict_reward(rollout: Rollout) -> float:
    assert rollout.verdict is not None, f"rollout {rollout.sample} of {rollout.prompt.id} was not judged"
    return rollout.verdict.reward


def drop_zero_variance(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """(kept, dropped): a group whose verdicts all give the same reward has no winner to learn from.

    It reads the verdicts, not the shaped rewards: as in DAPO, lengths alone must not rescue an all-right group.
    """
    kept: list[Group] = []
    dropped: list[Group] = []
    for group in groups:
        distinct = {verdict_reward(rollout) for rollout in group.rollouts}
        (kept if len(distinct) > 1 else dropped).append(group)
    return kept, dropped


def mask_overlong(groups: list[Group]) -> int:
    """Take rollouts that were cut off out of the loss; their rewards still count in the baseline. Returns how many."""
    cut_off = [rollout for group in groups for rollout in group.rollouts if rollout.truncated]
    for rollout in cut_off:
        rollout.masked = True
    return len(cut_off)


def soft_overlong(groups: list[Group], max_tokens: int, buffer: int, weight: float = 1.0) -> None:
    """DAPO's soft punishment: nothing up to max_tokens - buffer, then linearly down to -weight at max_tokens.

    Adds to `rollout.reward`, so rewards must have been set from the verdicts before.
    """
    assert 0 < buffer <= max_tokens, "the buffer lies within max_tokens"
    for group in groups:
        for rollout in group.rollouts:
            overrun = rollout.length - (max_tokens - buffer)
            rollout.reward -= weight * min(max(overrun / buffer, 0.0), 1.0)
