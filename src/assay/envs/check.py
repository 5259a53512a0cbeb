"""Does an environment keep its promises? For authors: `assay env check my_file.py:MyEnv`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from assay.envs.base import Env, Observation, Step, checked, is_masked, within
from assay.rewards.judge import one_line
from assay.tasks.base import SPLITS, NoSuchSplit, overlap
from assay.types import Prompt, UserError

NONSENSE = ("", "?", "banana 7 \n = \\boxed{} <answer> ####", "é 漢 " * 50)
EPISODES = 20
SECONDS = 60.0  # that one check may take


@dataclass(frozen=True)
class Finding:
    what: str
    problem: str  # empty: all is well

    @property
    def ok(self) -> bool:
        return not self.problem


def check_env(env: Env, episodes: int = EPISODES, seconds: float = SECONDS) -> list[Finding]:
    return list(findings(env, episodes, seconds))


def findings(env: Env, episodes: int = EPISODES, seconds: float = SECONDS) -> Iterator[Finding]:
    """All checks, on the first episodes of each split; a check that an author's code breaks off has failed.

    After one that takes longer than `seconds` the others are not tried: they would hang too.
    """
    checks: dict[str, Callable[[Env, Sequence[Prompt]], str]] = {
        "reset and step return what they have to": _forms,
        "the same seed begins the same episode": _seeding,
        "episodes side by side do not disturb each other": _side_by_side,
        "nonsense is borne, and episodes end": _termination,
        "what is not the policy's stays apart": _mask,
        "a perfect policy scores full": _gold,
        "splits share no episode": _splits,
    }
    told: set[str] = set()
    for what, check in checks.items():
        try:
            problem = within(seconds, partial(_guarded, check, env, episodes))
            yield Finding(what, "as above" if problem in told else problem)
            told |= {problem} - {""}
        except TimeoutError as error:
            yield Finding(what, f"{error}: does reset or step hang, or never end? The other checks were left out")
            return


def _guarded(check: Callable[[Env, Sequence[Prompt]], str], env: Env, episodes: int) -> str:
    try:
        return check(env, env.prompts("train")[:episodes])
    except UserError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return one_line(error)


def play(env: Env, prompt: Prompt, policy: Callable[[Env, int], str | None]) -> list[tuple[str, Step]]:
    """Actions and what came of them, to the end of the episode or of what the policy knows."""
    episode = env.fresh()
    episode.start(prompt)
    steps: list[tuple[str, Step]] = []
    while len(steps) < env.max_steps and not (steps and (steps[-1][1][2] or steps[-1][1][3])):
        action = policy(episode, len(steps))
        if action is None:
            break
        steps.append((action, checked(episode.step(action))))
    return steps


def _nonsense(episode: Env, step: int) -> str:
    return NONSENSE[step % len(NONSENSE)]


def _forms(env: Env, prompts: Sequence[Prompt]) -> str:
    """`start` and `checked` complain by themselves."""
    for prompt in prompts:
        env.fresh().start(prompt)
        play(env, prompt, _nonsense)
    return ""


def _seeding(env: Env, prompts: Sequence[Prompt]) -> str:
    for seed in (0, 1, 12345):
        first, second = (env.fresh().reset(seed=seed)[0] for _ in range(2))
        if first != second:
            return f"reset(seed={seed}) gave two observations"
    for prompt in prompts:
        if _readable(play(env, prompt, _nonsense)) != _readable(play(env, prompt, _nonsense)):
            return f"{prompt.id}: the same actions had other consequences: is there a random choice without the seed?"
    return ""


def _side_by_side(env: Env, prompts: Sequence[Prompt]) -> str:
    """Step by step in turns, as training plays them; each must go as it goes alone."""
    alone = [_readable(play(env, prompt, _nonsense)) for prompt in prompts[:2]]
    episodes = [env.fresh() for _ in prompts[:2]]
    for episode, prompt in zip(episodes, prompts, strict=False):
        episode.start(prompt)
    together: list[list[tuple[str, Step]]] = [[] for _ in episodes]
    for step in range(max(len(steps) for steps in alone)):
        for episode, steps, expected in zip(episodes, together, alone, strict=True):
            if step < len(expected):
                action = _nonsense(episode, step)
                steps.append((action, checked(episode.step(action))))
    if [_readable(steps) for steps in together] != alone:
        return "an episode changed another: reset must make anew whatever an episode changes (lists, generators, ...)"
    return ""


def _termination(env: Env, prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        played = play(env, prompt, _nonsense), play(env, prompt, lambda episode, _: episode.gold_action())
        if not any(step[2] or step[3] for steps in played for _, step in steps):
            return f"{prompt.id}: neither nonsense nor gold actions ended it within {env.max_steps} steps"
    return ""


def _mask(env: Env, prompts: Sequence[Prompt]) -> str:
    """Within a reply, an observation is new text: what the policy wrote must not come again as if it were given.

    Actions may be left out of the loss, but not all of them.
    """
    played = [play(env, prompt, lambda episode, _: episode.gold_action()) for prompt in prompts]
    answers = [step for steps in played for _, step in steps]
    if answers and all(map(is_masked, answers)):
        return "info['masked'] leaves every action of the gold policy out of the loss: nothing would be learnt"
    for prompt, steps in zip(prompts, played if env.inline else (), strict=False):
        for action, (observation, _, terminated, truncated, _) in steps:
            if not isinstance(observation, str):
                return f"{prompt.id}: an inline environment answers with text, not messages"
            if action.strip() and action in observation and not (terminated or truncated):
                return f"{prompt.id}: the observation repeats the action {action!r:.40}: return only what follows it"
    return ""


def _gold(env: Env, prompts: Sequence[Prompt]) -> str:
    for prompt in prompts:
        steps = play(env, prompt, lambda episode, _: episode.gold_action())
        if not steps:
            return "there is no gold policy to check with: write gold_action(self), what a perfect policy would say now"
        total = sum(step[1] for _, step in steps)
        if not steps[-1][1][2] or total < env.full - 1e-9:
            said = [action for action, _ in steps]
            return f"{prompt.id}: the gold policy got {total:g} of {env.full:g} with {said!r:.120}"
    return ""


def _splits(env: Env, prompts: Sequence[Prompt]) -> str:
    found = {}
    for split in SPLITS:
        try:
            found[split] = env.prompts(split)[:200]
        except NoSuchSplit:
            continue
    for split in [name for name in found if name != "train"]:
        shared = overlap(found["train"], found[split])
        if shared.n_shared:
            return f"{shared.n_shared} of {shared.n_eval} {split} episodes are train episodes too"
    return ""


def _readable(steps: Sequence[tuple[str, Step]]) -> list[tuple[Observation, float, bool, bool, bool]]:
    return [(*step[:4], is_masked(step)) for _, step in steps]
