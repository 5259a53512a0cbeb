"""What to leave out, or to discourage, before credit is given. All of these read what the judge and the engine said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.algos.returns import compared_returns
from assay.types import Group, Rollout

PassRates = Mapping[str, Sequence[float]]  # by prompt: (running pass rate, step at which it was last tried)

NEWS = 0.5  # weight of the latest group in a running pass rate


def verdict_reward(rollout: Rollout) -> float:
    assert rollout.verdict is not None, f"rollout {rollout.sample} of {rollout.prompt.id} was not judged"
    return rollout.verdict.reward


def has_zero_variance(group: Group, discount: float = 1.0, by_step: bool = False) -> bool:
    """Whether max == min over the rewards of a group's verdicts: no sample is better than another.

    Rewards are taken as judged, before shaping: as in DAPO, lengths alone must not rescue an all-right group.
    Where later rewards count less, or steps have credit of their own, the returns that are compared have to differ.
    """
    judged = [(one, one.reward if one.verdict is None else one.verdict.reward) for one in group.rollouts]
    values = [value for one, whole in judged for value in compared_returns(one, whole, discount, by_step)]
    return not values or max(values) == min(values)


def drop_zero_variance(
    groups: list[Group], discount: float = 1.0, by_step: bool = False
) -> tuple[list[Group], list[Group]]:
    """(kept, dropped): a group in which all were judged alike has no winner to learn from."""
    kept: list[Group] = []
    dropped: list[Group] = []
    for group in groups:
        (dropped if has_zero_variance(group, discount, by_step) else kept).append(group)
    return kept, dropped


def mask_overlong(groups: list[Group]) -> int:
    """Take rollouts that were cut off out of the loss; their rewards still count in the baseline. Returns how many."""
    cut_off = [rollout for group in groups for rollout in group.rollouts if rollout.truncated]
    for rollout in cut_off:
        rollout.masked = True
    return len(cut_off)


def soft_overlong(
    groups: list[Group], max_tokens: int, buffer: float, weight: float = 1.0, max_length: int = 0
) -> None:
    """DAPO's soft punishment: nothing up to the last `buffer` (a fraction) of the limit, then down to -weight at it.

    The limit of an answer is `max_tokens`, or what its contexts leave of a sequence of `max_length` tokens (0: any).
    Adds to `rollout.reward`, so rewards must have been set from the verdicts before.
    """
    assert 0 < buffer <= 1, "the buffer is a fraction of the limit"
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        given = sum(len(turn.context_ids) for turn in rollout.turns)
        limit = min(max_tokens, max_length - given) if max_length else max_tokens
        last = max(round(buffer * limit), 1)
        rollout.reward -= weight * min(max((rollout.length - (limit - last)) / last, 0.0), 1.0)


def within_reach(rates: PassRates, prompt_id: str, step: int, low: float, high: float, retry: int) -> bool:
    """Whether to try a prompt: it is new, its running pass rate lies within [low, high], or it is time for another try.

    `retry`: steps after which a prompt that was passed over gets one; 0: never.
    """
    if prompt_id not in rates:
        return True
    rate, last = rates[prompt_id]
    return low <= rate <= high or (retry > 0 and step - last >= retry)


def with_results(rates: PassRates, groups: Sequence[Group], step: int) -> dict[str, list[float]]:
    """The rates after these groups: half of what was known, half of what is new."""
    found = {prompt_id: list(known) for prompt_id, known in rates.items()}
    for group in groups:
        solved = sum(rollout.verdict is not None and rollout.verdict.correct for rollout in group.rollouts)
        new = solved / len(group.rollouts)
        before = found[group.prompt.id][0] if group.prompt.id in found else new
        found[group.prompt.id] = [before + NEWS * (new - before), float(step)]
    return found
