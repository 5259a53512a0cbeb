from __future__ import annotations

import threading
from typing import Any

import pytest
from sample_env import AsyncEnv, RaisingInReset, Unseeded, ValidEnv, build

from assay.envs import ENVS, Env
from assay.testing.env import check_env

SHIPPED: dict[str, dict[str, Any]] = {
    "single": {"task": "abacus"},
    "guess": {},
    "stepwise": {"task": "abacus", "separator": ";"},
    "calculator": {"task": "abacus"},
    "python": {"task": "abacus"},
    "countdown_tries": {},
}


def test_all_built_in_environments_are_checked() -> None:
    assert set(SHIPPED) == set(ENVS)


@pytest.mark.parametrize("name", SHIPPED)
def test_built_in_environments_pass_the_check(name: str) -> None:
    env = build(name, **SHIPPED[name])
    assert [finding for finding in check_env(env, episodes=6) if not finding.ok] == []
    env.close()


class SharingState(ValidEnv):
    shared: list[str] = []  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed)
        self.seen = SharingState.shared
        self.seen.clear()
        return result


class Endless(ValidEnv):
    def step(self, action: str) -> Any:
        return "again", 0.0, False, False, {}


class Goldless(ValidEnv):
    def gold_action(self) -> str | None:
        return None


class WithoutTruncated(ValidEnv):
    def step(self, action: str) -> Any:
        return "x", 0.0, True


class WithoutObservation(ValidEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return None, {}


class WithoutInfo(ValidEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"seed {seed}"


class Hanging(ValidEnv):
    def step(self, action: str) -> Any:
        threading.Event().wait()


class Repeating(ValidEnv):
    inline = True

    def step(self, action: str) -> Any:
        return f"{action} and more", 0.0, False, False, {}


class AsyncRaising(ValidEnv):
    async def step(self, action: str) -> Any:
        raise KeyError("connection")


class Masking(ValidEnv):
    def step(self, action: str) -> Any:
        *rest, info = super().step(action)
        return (*rest, info | {"masked": True})


class FailingClose(ValidEnv):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


@pytest.mark.parametrize("kind", [ValidEnv, AsyncEnv])
def test_valid_environment_passes_the_check(kind: type[Env]) -> None:
    assert [finding for finding in check_env(kind()) if not finding.ok] == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unseeded, "different observations"),
        (SharingState, "an episode changed another"),
        (Endless, "within 3 steps"),
        (Goldless, "gold_action"),
        (WithoutTruncated, "truncated, info"),
        (Repeating, "repeats the action"),
        (Masking, "out of the loss"),
        (WithoutObservation, "not None"),
        (WithoutInfo, "(observation, info)"),
        (RaisingInReset, "KeyError: 'file'"),
        (AsyncRaising, "KeyError: 'connection'"),
        (FailingClose, "already closed"),
    ],
)
def test_check_reports_the_problem(kind: type[Env], message: str) -> None:
    assert message in "; ".join(finding.problem for finding in check_env(kind()))


def test_check_ends_after_the_time_limit() -> None:
    (finding,) = check_env(Hanging(), seconds=0.2)
    assert not finding.ok and "0.2 s" in finding.problem
