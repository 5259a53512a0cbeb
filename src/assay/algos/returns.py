"""From the rewards of an episode's steps to what is compared: discounted returns, of whole episodes or of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from assay.types import Group, Rollout


def returns(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """For each step, its reward and all that follow, each later one multiplied by `discount` once more."""
    found: list[float] = []
    after = 0.0
    for reward in reversed(rewards):
        after = reward + discount * after
        found.append(after)
    return found[::-1]


def step_rewards(rollout: Rollout, whole: float | None = None) -> list[float]:
    """Rewards of its turns; what the whole got beyond them (a verdict, a length punishment) came with the last one."""
    rewards = [turn.reward for turn in rollout.turns]
    rewards[-1] += (rollout.reward if whole is None else whole) - sum(rewards)
    return rewards


def token_rewards(rollout: Rollout, prices: Sequence[float] | None = None) -> list[float]:
    """What comes with each of its tokens in the loss: a step's reward with the last one of it.

    That of a masked step comes with the last one before it; before the first there is none that could have earned it.
    `prices`: of single tokens, which `rollout.reward` has paid in all; here each pays its own.
    """
    rewards = [0.0] * rollout.trained
    trained = 0
    for turn, reward in zip(rollout.turns, step_rewards(rollout), strict=True):
        trained += turn.trained
        if trained:
            rewards[trained - 1] += reward
    if rewards and prices is not None:
        rewards[-1] += sum(prices)
        rewards = [reward - price for reward, price in zip(rewards, prices, strict=True)]
    return rewards


def credited_returns(group: Group, discount: float = 1.0, by_step: bool = False) -> list[float]:
    """What an advantage function compares within a group.

    One return for each episode; or, `by_step`, one for each step of each episode, so that a step is compared with all
    steps of all samples of its group, as in Kevin (arXiv 2507.11948). Masked steps are none of these.
    """
    return [value for r in group.rollouts for value in compared_returns(r, r.reward, discount, by_step)]


def credited_tokens(group: Group, by_step: bool = False) -> list[int]:
    """How many trained tokens have each of the `credited_returns`."""
    if not by_step:
        return [rollout.trained for rollout in group.rollouts]
    return [turn.trained for rollout in group.rollouts for turn in rollout.turns if not turn.masked]


def compared_returns(rollout: Rollout, whole: float, discount: float, by_step: bool) -> list[float]:
    """The return of one episode that got `whole` in all, or, `by_step`, those of its steps that are in the loss."""
    if not by_step and discount == 1.0:
        return [whole]
    found = returns(step_rewards(rollout, whole), discount)
    if not by_step:
        return found[:1]
    return [value for value, turn in zip(found, rollout.turns, strict=True) if not turn.masked]


def any_masked(group: Group) -> bool:
    return any(turn.masked for rollout in group.rollouts for turn in rollout.turns)


def give_advantages(group: Group, advantages: Sequence[float], by_step: bool = False) -> None:
    """In the order of `credited_returns`. A step's is that of its tokens; a rollout's own that of its first."""
    coming: Iterator[float] = iter(advantages)
    for rollout in group.rollouts:
        turns = [turn for turn in rollout.turns if not turn.masked]
        steps = [next(coming) for _ in (turns if by_step else range(1))]
        rollout.advantage, rollout.token_advantages = (steps or [0.0])[0], None
        if by_step:
            each = zip(steps, turns, strict=True)
            rollout.token_advantages = [value for value, turn in each for _ in turn.completion.token_ids]
