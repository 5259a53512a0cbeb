"""Steps of environments: at once, or in threads while the engine goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, Protocol, TypeVar

from assay.envs.base import Env, Step, failed_step
from assay.envs.deadline import reported_after, within

LEAST_SECONDS = 1.0  # that a step is given, however short an episode may be
REPORT_S = 60.0  # after which a step without a limit is reported
SIDE_BY_SIDE = 8  # steps of a slow environment, where each has a limit


class HasEnv(Protocol):
    env: Env


E = TypeVar("E", bound=HasEnv)


class Stepper(Generic[E]):
    """Actions in, answers out. Without threads all actions are answered together, in order, when answers are asked for.

    With threads, and an environment that says it is slow, every action is answered by itself, and one that takes long
    keeps nobody else waiting: who is answered when then depends on the clock. With a limit, a step that takes longer
    is given up, and ends its episode as one that failed. Without one it is reported, and waited for.
    """

    def __init__(self, env: Env, threads: int, seconds: float = 0.0) -> None:
        self.env = env
        self.seconds = max(seconds, LEAST_SECONDS) if seconds else 0.0
        self.pool = ThreadPoolExecutor(threads, "assay-env") if threads and env.slow else None
        self.added: list[tuple[E, str]] = []
        self.under_way: list[tuple[E, Future[Sequence[Step]]]] = []

    @property
    def busy(self) -> bool:
        return bool(self.added or self.under_way)

    def add(self, episode: E, action: str) -> None:
        if self.pool is None:
            self.added.append((episode, action))
        else:
            self.under_way.append((episode, self.pool.submit(self._steps, [episode.env], [action])))

    def done(self, wait_for_one: bool) -> list[tuple[E, Step]]:
        """Answers that there are, in the order of their actions."""
        if not self.busy:
            return []
        if self.pool is None:
            added, self.added = self.added, []
            steps = self._steps([episode.env for episode, _ in added], [action for _, action in added])
            return [(episode, step) for (episode, _), step in zip(added, steps, strict=True)]
        if wait_for_one:
            wait([future for _, future in self.under_way], return_when=FIRST_COMPLETED)
        under_way, self.under_way, found = self.under_way, [], []
        for episode, future in under_way:
            if future.done():
                found.append((episode, future.result()[0]))
            else:
                self.under_way.append((episode, future))
        return found

    def _steps(self, envs: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        if not self.seconds:
            what = "a step" if len(envs) == 1 else f"a step of {len(envs)} episodes"
            text = (
                f"{self.env.name}: {what} has been running for {REPORT_S:g} s; env.max_seconds gives up on such steps"
            )
            with reported_after(REPORT_S, text):
                return self.env.step_all(envs, actions)
        if self.env.slow and len(envs) > 1:
            with ThreadPoolExecutor(SIDE_BY_SIDE, "assay-env") as pool:
                return list(pool.map(self._limited, envs, actions))
        return [self._limited(env, action) for env, action in zip(envs, actions, strict=True)]

    def _limited(self, env: Env, action: str) -> Step:
        try:
            return within(self.seconds, lambda: self.env.step_all([env], [action])[0])
        except TimeoutError as error:
            return failed_step(error)

    def close(self) -> None:
        """What is still under way ends by itself, and nobody hears of it."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
