"""Check an author's environment against its contract: `assay env check my_file.py:MyEnv`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from assay.envs.base import Env, Observation, Step, is_masked, validate_step
from assay.system.awaiting import resolve, run_with_timeout
from assay.tasks.base import SPLITS, NoSuchSplit, overlap
from assay.types import Prompt, UserError, describe_error, plural

__all__ = ["Finding", "check_env"]

INVALID_ACTIONS = ("", "?", "banana 7 \n = \\boxed{} <answer> ####", "é 漢 " * 50)
EPISODES = 20
SECONDS = 60.0  # time limit of one check


@dataclass(frozen=True)
class Finding:
    what: str
    problem: str  # empty: passed

    @property
    def ok(self) -> bool:
        return not self.problem


def check_env(env: Env, episodes: int = EPISODES, seconds: float = SECONDS) -> list[Finding]:
    return list(findings(env, episodes, seconds))


def findings(env: Env, episodes: int = EPISODES, seconds: float = SECONDS) -> Iterator[Finding]:
    """Yield the results of all checks, on the first episodes of each split; finally, the environment is closed.

    A check in which the environment raises has failed. After a check that exceeds its time limit, the others are
    skipped, because they would hang too.
    """
    checks: dict[str, Callable[[Env, Sequence[Prompt]], str]] = {
        "reset and step return valid values": _return_values,
        "the same seed starts the same episode": _seeding,
        "concurrent episodes are independent": _independence,
        "invalid actions are handled, and episodes end": _termination,
        "observations never repeat policy text": _mask,
        "a perfect policy reaches max_return": _gold,
        "splits share no episode": _splits,
        "close can be called twice": _close,
    }
    reported: set[str] = set()
    for what, check in checks.items():
        try:
            problem = run_with_timeout(seconds, partial(_guarded, check, env, episodes))
            yield Finding(what, "as above" if problem in reported else problem)
            reported |= {problem} - {""}
        except TimeoutError as error:
            yield Finding(what, f"{error}: does reset or step hang? The other checks were skipped")
            return


def _guarded(check: Callable[[Env, Sequence[Prompt]], str], env: Env, episodes: int) -> str:
    try:
        return check(env, env.prompts("train")[:episodes])
    except UserError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return describe_error(error)


def play(env: Env, prompt: Prompt, policy: Callable[[Env, int], str | None]) -> list[tuple[str, Step]]:
    """Play an episode until it ends or the policy returns None; return actions and steps."""
    episode = env.copy()
    resolve(episode.start(prompt))
    steps: list[tuple[str, Step]] = []
    while len(steps) < env.max_steps and not (steps and (steps[-1][1][2] or steps[-1][1][3])):
        action = policy(episode, len(steps))
        if action is None:
            break
        steps.append((action, validate_step(resolve(episode.step(action)))))
    return steps


def _invalid_action(episode: Env, step: int) -> str:
    return INVALID_ACTIONS[step % len(INVALID_ACTIONS)]


def _return_values(env: Env, prompts: Sequence[Prompt]) -> str:
    """`start` and `validate_step` raise if a value is invalid."""
    for prompt in prompts:
        resolve(env.copy().start(prompt))
        play(env, prompt, _invalid_action)
    return ""


def _seeding(env: Env, prompts: Sequence[Prompt]) -> str:
    for seed in (0, 1, 12345):
        first, second = (resolve(env.copy().reset(seed=seed))[0] for _ in range(2))
        if first != second:
            return f"reset(seed={seed}) returned two different observations"
    for prompt in prompts:
        if _comparable(play(env, prompt, _invalid_action)) != _comparable(play(env, prompt, _invalid_action)):
            return f"{prompt.id}: the same actions had different results: is there a random choice without the seed?"
    return ""


def _independence(env: Env, prompts: Sequence[Prompt]) -> str:
    """Interleave the steps of two episodes, as training does; each must be as when played alone."""
    separate = [_comparable(play(env, prompt, _invalid_action)) for prompt in prompts[:2]]
    episodes = [env.copy() for _ in prompts[:2]]
    for episode, prompt in zip(episodes, prompts, strict=False):
        resolve(episode.start(prompt))
    together: list[list[tuple[str, Step]]] = [[] for _ in episodes]
    for step in range(max(len(steps) for steps in separate)):
        for episode, steps, expected in zip(episodes, together, separate, strict=True):
            if step < len(expected):
                action = _invalid_action(episode, step)
                steps.append((action, validate_step(resolve(episode.step(action)))))
    if [_comparable(steps) for steps in together] != separate:
        return "an episode changed another: reset must create all state of an episode (lists, generators, ...)"
    return ""


def _termination(env: Env, prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        played = play(env, prompt, _invalid_action), play(env, prompt, lambda episode, _: episode.gold_action())
        if not any(step[2] or step[3] for steps in played for _, step in steps):
            limit = plural(env.max_steps, "step")
            return f"{prompt.id}: neither invalid nor gold actions ended the episode within {limit}"
    return ""


def _mask(env: Env, prompts: Sequence[Prompt]) -> str:
    """Inline observations must not repeat the action. Actions may be left out of the loss, but not all of them."""
    played = [play(env, prompt, lambda episode, _: episode.gold_action()) for prompt in prompts]
    outcomes = [step for steps in played for _, step in steps]
    if outcomes and all(map(is_masked, outcomes)):
        return "info['masked'] leaves every action of the gold policy out of the loss: nothing would be trained"
    for prompt, steps in zip(prompts, played if env.inline else (), strict=False):
        for action, (observation, _, terminated, truncated, _) in steps:
            if not isinstance(observation, str):
                return f"{prompt.id}: an inline environment must return text, not messages"
            if action.strip() and action in observation and not (terminated or truncated):
                return f"{prompt.id}: the observation repeats the action {action!r:.40}: return only what follows it"
    return ""


def _gold(env: Env, prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        steps = play(env, prompt, lambda episode, _: episode.gold_action())
        if not steps:
            return "there is no gold policy to check with: define gold_action(self), the action of a perfect policy"
        total = sum(step[1] for _, step in steps)
        if not steps[-1][1][2] or total < env.max_return - 1e-9:
            actions = [action for action, _ in steps]
            return f"{prompt.id}: the gold policy reached {total:g} of {env.max_return:g} with {actions!r:.120}"
    return ""


def _splits(env: Env, prompts: Sequence[Prompt]) -> str:
    prompts_by_split = {}
    for split in SPLITS:
        try:
            prompts_by_split[split] = env.prompts(split)[:200]
        except NoSuchSplit:
            continue
    for split in [name for name in prompts_by_split if name != "train"]:
        shared = overlap(prompts_by_split["train"], prompts_by_split[split])
        if shared.n_shared:
            return f"{shared.n_shared} of {shared.n_eval} {split} episodes are also train episodes"
    return ""


def _close(env: Env, prompts: Sequence[Prompt]) -> str:
    """Raises if a call fails."""
    resolve(env.close())
    resolve(env.close())
    return ""


def _comparable(steps: Sequence[tuple[str, Step]]) -> list[tuple[Observation, float, bool, bool, bool]]:
    return [(*step[:4], is_masked(step)) for _, step in steps]
