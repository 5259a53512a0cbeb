"""The checks for authors of engine backends: built-in engines pass, and each violation is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from event_parts import GPU_LIKE, build, policy
from native_parts import Mode, words

from assay.engine import Engine, Event, Failed, Finished, Request, TokenChunk, WeightSource
from assay.engine.base import EngineLoad
from assay.engine.check import CHECKS, Probe, check_engine, problems
from assay.types import UserError

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
    """A native engine with one method, or its events, changed."""

    def __init__(self) -> None:
        self.engine = build("native")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Events(Broken):
    def change(self, event: Event) -> Event | None:
        return event

    def step(self, wait: bool = True) -> list[Event]:
        return [changed for event in self.engine.step(wait) if (changed := self.change(event)) is not None]


class LosesASample(Events):
    def change(self, event: Event) -> Event | None:
        return None if isinstance(event, Finished) and event.sample == 1 else event


class LosesErrors(Events):
    def change(self, event: Event) -> Event | None:
        return None if isinstance(event, Failed) else event


class LosesStreamedTokens(Events):
    def change(self, event: Event) -> Event | None:
        return replace(event, token_ids=event.token_ids[1:]) if isinstance(event, TokenChunk) else event


class ChangesCompletions(Events):
    def completed(self, completion: Any) -> Any:
        return completion

    def change(self, event: Event) -> Event | None:
        return replace(event, completion=self.completed(event.completion)) if isinstance(event, Finished) else event


class ScalesLogprobs(ChangesCompletions):
    def completed(self, completion: Any) -> Any:
        return replace(completion, engine_logprobs=[value * 1.1 for value in completion.engine_logprobs])


class ReportsNoEntropy(ChangesCompletions):
    def completed(self, completion: Any) -> Any:
        return replace(completion, entropy=0.0)


class ReportsNoTruncation(ChangesCompletions):
    def completed(self, completion: Any) -> Any:
        return replace(completion, kept_mass=1.0)


class ReportsAnOldVersion(ChangesCompletions):
    def completed(self, completion: Any) -> Any:
        return replace(completion, version=completion.version - 1, version_spans=())


class ChangesRequests(Broken):
    def __init__(self, change: Callable[[Request], Request]) -> None:
        super().__init__()
        self.change = change

    def add(self, request: Request) -> int:
        return self.engine.add(self.change(request))


def without(**ignored: Any) -> Callable[[], ChangesRequests]:
    """An engine that ignores some sampling parameters."""
    return lambda: ChangesRequests(lambda request: replace(request, params=replace(request.params, **ignored)))


class RaisesInAdd(Broken):
    def add(self, request: Request) -> int:
        if not request.prompt_ids:
            raise UserError("the prompt is empty")
        return self.engine.add(request)


class IgnoresAborts(Broken):
    def abort(self, ids: Iterable[Any]) -> None:
        pass


class AbortsWholeRequests(Broken):
    def abort(self, ids: Iterable[Any]) -> None:
        self.engine.abort([one[0] if isinstance(one, tuple) else one for one in ids])


class IgnoresReleases(Broken):
    def release(self, handles: Iterable[int]) -> None:
        pass


class KeepsOldWeights(Broken):
    def update_weights(self, source: WeightSource, version: int) -> None:
        self.engine.update_weights(policy("native"), version)


class KeepsTheVersion(Broken):
    def update_weights(self, source: WeightSource, version: int) -> None:
        self.engine.update_weights(source, self.engine.info.version)


class HasNoFingerprint(Broken):
    def fingerprint(self) -> None:
        return None


class HasAConstantFingerprint(Broken):
    def fingerprint(self) -> str:
        return "0" * 32


class OverstatesItsLength(Broken):
    @property
    def info(self) -> Any:
        return replace(self.engine.info, max_length=self.engine.info.max_length + 10)


class DeniesUpdates(Broken):
    @property
    def info(self) -> Any:
        able = replace(self.engine.info.capabilities, inflight_updates=False)
        return replace(self.engine.info, capabilities=able)


class ScoresAtTemperature1(Broken):
    def score(self, sequences: Any, temperature: float = 1.0) -> list[list[float]]:
        return self.engine.score(sequences, 1.0)


class FailsAfterSleep(Broken):
    def sleep(self) -> None:
        raise RuntimeError("sleeps\nforever")


class HasOtherDigests(Broken):
    def digests(self) -> dict[str, str]:
        return self.engine.digests() | {"extra": "0"}


class IsNeverIdle(Broken):
    load = EngineLoad(running=0, waiting=1)


class HasAServerWithOtherWeights(Broken):
    def score_each(self, sequences: Any) -> dict[str, list[list[float]]]:
        scores = self.engine.score(sequences)
        return {"one": scores, "two": [[value - 1 for value in own] for own in scores]}


FINDINGS: dict[Callable[[], Broken], str] = {
    LosesASample: "requests and samples: step(wait=True) returned nothing although a request was unfinished",
    LosesErrors: "invalid requests: step(wait=True) returned nothing",
    LosesStreamedTokens: "streaming: the chunks of a sample are not its completion",
    ScalesLogprobs: "log probabilities: engine_logprobs and score differ at temperature 1",
    ReportsNoEntropy: "entropy and kept mass: the entropy of a sampled completion is not positive",
    ReportsNoTruncation: "entropy and kept mass: kept_mass is not below 1 with top_k = 2",
    ReportsAnOldVersion: "requests and samples: the version of new tokens is not 0",
    without(stop_token_ids=()): "stop and forbidden tokens: a completion does not end with the first stop token",
    without(forbidden_token_ids=()): "stop and forbidden tokens: a forbidden token is sampled",
    without(stop=()): "stop strings: a completion does not end with the token that completes a stop string",
    lambda: ChangesRequests(
        lambda request: replace(request, seed=next(SEEDS))
    ): "exact seeds: the same seeds give different tokens",
    lambda: ChangesRequests(
        lambda request: replace(request, seed=0)
    ): "sampling: requests with different seeds have equal samples",
    without(top_k=0): "sampling: top_k = 1 does not give the greedy tokens",
    lambda: ChangesRequests(
        lambda request: replace(request, stream=True)
    ): "streaming: a request without stream yields chunks",
    RaisesInAdd: "invalid requests: UserError: the prompt is empty",
    IgnoresAborts: "abort: an event follows the abort of its sample",
    AbortsWholeRequests: "abort: an abort drops samples that it does not name",
    IgnoresReleases: "handles: a handle can be continued after its release",
    KeepsOldWeights: "weight updates: other weights do not change log-probabilities",
    KeepsTheVersion: "weight updates: info.version is not that of the last update",
    HasNoFingerprint: "fingerprints: fingerprint() is None, and the capability is True",
    HasAConstantFingerprint: "fingerprints: the fingerprint is not the policy's",
    HasOtherDigests: "fingerprints: digests() returns other weights than the policy's",
    IsNeverIdle: "load of an idle engine: load counts requests although all are finished",
    HasAServerWithOtherWeights: "scores of each server: score_each of the server 'two' differs from score",
    OverstatesItsLength: "lengths: a valid request failed",
    DeniesUpdates: "updates while requests run: update_weights while a request is running is not refused",
    ScoresAtTemperature1: "log probabilities: engine_logprobs and score differ at temperature 8",
    FailsAfterSleep: "sleep and cache: RuntimeError: sleeps forever",
}


@pytest.mark.parametrize(("make", "finding"), FINDINGS.items(), ids=[text[:60] for text in FINDINGS.values()])
def test_check_engine_reports_each_violation_in_one_line(make: Callable[[], Broken], finding: str) -> None:
    engine: Engine = make()  # type: ignore[assignment]
    checks = [check for check in CHECKS if finding.startswith(check.__name__.replace("_", " "))]
    assert len(checks) == 1
    (problem,) = problems(Probe(engine, PROMPT, policy("native"), words), checks)
    assert problem.startswith(finding) and "\n" not in problem


def test_check_engine_continues_after_a_violation() -> None:
    engine: Engine = IgnoresAborts()  # type: ignore[assignment]
    titles = [problem.partition(":")[0] for problem in check_engine(engine, PROMPT, policy("native"), words)]
    assert titles == ["abort", "calls from another thread"]
