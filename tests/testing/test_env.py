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


@pytest.mark.parametrize("name", ENVS)
def test_built_in_environments_pass_the_check(name: str) -> None:
    env = build(name, **SHIPPED[name])
    assert [finding for finding in check_env(env, episodes=6) if not finding.ok] == []
    env.close()


@pytest.mark.parametrize("kind", [ValidEnv, AsyncEnv])
def test_valid_environment_passes_the_check(kind: type[Env]) -> None:
    assert [finding for finding in check_env(kind()) if not finding.ok] == []


def changed(**methods: Any) -> type[Env]:
    return type("Changed", (ValidEnv,), methods)


SHARED: list[str] = []
LAST = ("again", 0.0, False, False, {})


def share_state(env: Any, *, seed: int | None = None, options: Any = None) -> Any:
    result = ValidEnv.reset(env, seed=seed)
    env.seen = SHARED
    SHARED.clear()
    return result


async def lose_connection(env: Any, action: str) -> Any:
    raise KeyError("connection")


def mask(env: Any, action: str) -> Any:
    *rest, info = ValidEnv.step(env, action)
    return (*rest, info | {"masked": True})


def close_once(env: Any) -> None:
    if getattr(env, "closed", False):
        raise RuntimeError("already closed")
    env.closed = True


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unseeded, "different observations"),
        (RaisingInReset, "KeyError: 'file'"),
        (changed(reset=share_state), "an episode changed another"),
        (changed(reset=lambda env, *, seed=None, options=None: (None, {})), "not None"),
        (changed(reset=lambda env, *, seed=None, options=None: f"seed {seed}"), "(observation, info)"),
        (changed(step=lambda env, action: LAST), "within 3 steps"),
        (changed(step=lambda env, action: ("x", 0.0, True)), "truncated, info"),
        (changed(step=lambda env, action: (f"{action} and more", *LAST[1:]), inline=True), "repeats the action"),
        (changed(step=mask), "out of the loss"),
        (changed(step=lose_connection), "KeyError: 'connection'"),
        (changed(gold_action=lambda env: None), "gold_action"),
        (changed(close=close_once), "already closed"),
    ],
)
def test_check_reports_the_problem(kind: type[Env], message: str) -> None:
    assert message in "; ".join(finding.problem for finding in check_env(kind()))


def test_check_ends_after_the_time_limit() -> None:
    hanging = changed(step=lambda env, action: threading.Event().wait())()
    (finding,) = check_env(hanging, seconds=0.2)
    assert not finding.ok and "0.2 s" in finding.problem
