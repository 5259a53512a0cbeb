"""The checks for authors of engine backends: built-in engines pass, and each violation is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from event_parts import GPU_LIKE, build, policy
from native_parts import Mode, words

from assay.engine import Engine, Event, Failed, Finished, Request, TokenChunk
from assay.engine.base import EngineLoad
from assay.testing.engine import CHECKS, Probe, check_engine, problems
from assay.types import Completion, UserError

PROMPT = [1, 2, 3, 4, 5]
FEW_ROWS = Mode(max_batch=3)
SEEDS = count()


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("native", GPU_LIKE), ("native", FEW_ROWS), pytest.param("hf", FEW_ROWS, marks=pytest.mark.slow)],
)
def test_built_in_engines_pass_all_checks(backend: str, mode: Mode) -> None:
    assert check_engine(build(backend, mode=mode), PROMPT, policy(backend), words) == []


def test_check_engine_without_policy_and_decode_function() -> None:
    assert check_engine(build("native"), PROMPT) == []


class Broken:
    """A native engine with some methods or attributes changed.

    A changed method is called with the engine and its arguments. A changed attribute is a function of the original.
    """

    def __init__(self, **changes: Callable[..., Any]) -> None:
        self.engine, self.changes = build("native"), changes

    def __getattr__(self, name: str) -> Any:
        original = getattr(self.engine, name)
        if name not in self.changes:
            return original
        return partial(self.changes[name], self.engine) if callable(original) else self.changes[name](original)


def with_events(change: Callable[[Event], Event | None]) -> dict[str, Callable[..., Any]]:
    """Events are changed; None: dropped."""

    def step(engine: Engine, wait: bool = True) -> list[Event]:
        return [changed for event in engine.step(wait) if (changed := change(event)) is not None]

    return {"step": step}


def with_completions(change: Callable[[Completion], dict[str, Any]]) -> dict[str, Callable[..., Any]]:
    """Completions have other values."""

    def changed(event: Event) -> Event:
        if not isinstance(event, Finished):
            return event
        return replace(event, completion=replace(event.completion, **change(event.completion)))

    return with_events(changed)


def with_requests(change: Callable[[Request], Request]) -> dict[str, Callable[..., Any]]:
    return {"add": lambda engine, request: engine.add(change(request))}


def without(**ignored: Any) -> dict[str, Callable[..., Any]]:
    """Some sampling parameters are ignored."""
    return with_requests(lambda request: replace(request, params=replace(request.params, **ignored)))


def add_or_raise(engine: Engine, request: Request) -> int:
    if not request.prompt_ids:
        raise UserError("the prompt is empty")
    return engine.add(request)


def fail(engine: Engine) -> None:
    raise RuntimeError("sleeps\nforever")


def scores_of_two_servers(engine: Engine, sequences: Any) -> dict[str, list[list[float]]]:
    scores = engine.score(sequences)
    return {"one": scores, "two": [[value - 1 for value in sequence] for sequence in scores]}


IGNORES_ABORTS: dict[str, Callable[..., Any]] = {"abort": lambda engine, ids: None}
FINDINGS: dict[str, dict[str, Callable[..., Any]]] = {
    "requests and samples: step(wait=True) returned nothing although a request was unfinished": with_events(
        lambda event: None if isinstance(event, Finished) and event.sample == 1 else event
    ),
    "invalid requests: step(wait=True) returned nothing": with_events(
        lambda event: None if isinstance(event, Failed) else event
    ),
    "streaming: the chunks of a sample are not its completion": with_events(
        lambda event: replace(event, token_ids=event.token_ids[1:]) if isinstance(event, TokenChunk) else event
    ),
    "log probabilities: engine_logprobs and score differ at temperature 1": with_completions(
        lambda completion: {"engine_logprobs": [value * 1.1 for value in completion.engine_logprobs]}
    ),
    "entropy and kept mass: the entropy of a sampled completion is not positive": with_completions(
        lambda completion: {"entropy": 0.0}
    ),
    "entropy and kept mass: kept_mass is not below 1 with top_k = 2": with_completions(
        lambda completion: {"kept_mass": 1.0}
    ),
    "requests and samples: the version of new tokens is not 0": with_completions(
        lambda completion: {"version": completion.version - 1, "version_spans": ()}
    ),
    "stop and forbidden tokens: a completion does not end with the first stop token": without(stop_token_ids=()),
    "stop and forbidden tokens: a forbidden token is sampled": without(forbidden_token_ids=()),
    "stop strings: a completion does not end with the token that completes a stop string": without(stop=()),
    "exact seeds: the same seeds give different tokens": with_requests(
        lambda request: replace(request, seed=next(SEEDS))
    ),
    "sampling: requests with different seeds have equal samples": with_requests(
        lambda request: replace(request, seed=0)
    ),
    "sampling: top_k = 1 does not give the greedy tokens": without(top_k=0),
    "streaming: a request without stream yields chunks": with_requests(lambda request: replace(request, stream=True)),
    "invalid requests: UserError: the prompt is empty": {"add": add_or_raise},
    "abort: an event follows the abort of its sample": IGNORES_ABORTS,
    "abort: an abort drops samples that it does not name": {
        "abort": lambda engine, ids: engine.abort([one[0] if isinstance(one, tuple) else one for one in ids])
    },
    "handles: a handle can be continued after its release": {"release": lambda engine, handles: None},
    "weight updates: other weights do not change log-probabilities": {
        "update_weights": lambda engine, source, version: engine.update_weights(policy("native"), version)
    },
    "weight updates: info.version is not that of the last update": {
        "update_weights": lambda engine, source, version: engine.update_weights(source, engine.info.version)
    },
    "fingerprints: fingerprint() is None, and the capability is True": {"fingerprint": lambda engine: None},
    "fingerprints: the fingerprint is not the policy's": {"fingerprint": lambda engine: "0" * 32},
    "fingerprints: digests() returns other weights than the policy's": {
        "digests": lambda engine: engine.digests() | {"extra": "0"}
    },
    "load of an idle engine: load counts requests although all are finished": {
        "load": lambda load: EngineLoad(running=0, waiting=1)
    },
    "scores of each server: score_each of the server 'two' differs from score": {"score_each": scores_of_two_servers},
    "lengths: a valid request failed": {"info": lambda info: replace(info, max_length=info.max_length + 10)},
    "updates while requests run: update_weights while a request is running is not refused": {
        "info": lambda info: replace(info, capabilities=replace(info.capabilities, inflight_updates=False))
    },
    "log probabilities: engine_logprobs and score differ at temperature 8": {
        "score": lambda engine, sequences, temperature=1.0: engine.score(sequences, 1.0)
    },
    "sleep and cache: RuntimeError: sleeps forever": {"sleep": fail},
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_check_engine_reports_each_violation_in_one_line(finding: str) -> None:
    engine: Engine = Broken(**FINDINGS[finding])  # type: ignore[assignment]
    checks = [check for check in CHECKS if finding.startswith(check.__name__.replace("_", " "))]
    assert len(checks) == 1
    (problem,) = problems(Probe(engine, PROMPT, policy("native"), words), checks)
    assert problem.startswith(finding) and "\n" not in problem


def test_check_engine_continues_after_a_violation() -> None:
    engine: Engine = Broken(**IGNORES_ABORTS)  # type: ignore[assignment]
    titles = [problem.partition(":")[0] for problem in check_engine(engine, PROMPT, policy("native"), words)]
    assert titles == ["abort", "calls from another thread"]
