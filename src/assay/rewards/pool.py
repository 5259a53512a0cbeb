"""Judging the answers of a run: in sandboxed worker processes (see `assay.system`) with a time limit per completion,
and by a model, whose rewards are added by weight."""

from __future__ import annotations

import importlib
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import cloudpickle

from assay.rewards.code import CodeJudge
from assay.rewards.functions import FunctionJudge
from assay.rewards.judge import (
    Judge,
    RewardMix,
    failed_verdict,
    inner_judges,
    judge_group_safely,
    judged_fields,
    judges_async,
    prepare_judge,
    sees_group,
)
from assay.system.awaiting import resolve, then, together, warn_after
from assay.system.sandbox import Level, WorkerSettings, environment
from assay.system.spawn import BadMessage
from assay.system.worker_pool import ItemFailure, StartFailed, WorkerPool
from assay.types import Closeable, Prompt, Status, UserError, Verdict, describe_error, is_valid_reward, plural

Item = tuple[str, str, Mapping[str, Any]]  # completion, gold answer, fields
GroupItem = tuple[Sequence[str], str, Mapping[str, Any]]  # all completions of a prompt, gold answer, fields
JudgeReport = Callable[[int, int], None]  # receives the number of judged items and the number of all items
Sandbox = Literal["auto", "strict", "off"]  # the setting reward.sandbox
Place = Literal["local", "ray"]  # the setting reward.pool

MARGIN_S = 2.0  # by which judging may take longer than the program that it runs
_STATUSES = [str(status.value) for status in Status]
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b[A-Z]{5,}\b")
_REFUSED = re.compile(r"PermissionError|Errno 1[,\]]|Errno 13\b|Permission denied|not permitted")


class Judging(Closeable):
    """What judges the answers of a run. A `with` block closes it."""

    @abstractmethod
    def fields(self, prompt: Prompt) -> Mapping[str, Any]:
        """Return the fields of a prompt as its judge needs them."""

    @abstractmethod
    def judge_groups(self, groups: Sequence[GroupItem], report: JudgeReport | None = None) -> list[list[Verdict]]:
        """Return the verdicts on all completions of each prompt."""

    def judge(self, items: Sequence[Item], report: JudgeReport | None = None) -> list[Verdict]:
        """Return one verdict per (completion, gold answer, fields), in order."""
        return [verdict for (verdict,) in self.judge_groups([([item[0]], *item[1:]) for item in items], report)]


def single_items(groups: Sequence[GroupItem]) -> list[Item]:
    """The items of all groups, one after the other."""
    return [(completion, *group[1:]) for group in groups for completion in group[0]]


def regroup(verdicts: Iterable[Verdict], groups: Sequence[GroupItem]) -> list[list[Verdict]]:
    """Verdicts on `single_items`, by group."""
    remaining = iter(verdicts)
    return [list(islice(remaining, len(group[0]))) for group in groups]


class JudgePool(Judging):
    """Judges items in `workers` processes; verdicts are returned in the order of the items.

    An item that takes longer than `timeout_s` gets status timeout, one on which two workers die gets status error (see
    `WorkerPool`). Each process may use `memory_gb` of address space. `sandbox` and `pass_env` are the settings of that
    name in the section `reward`: "auto" is strict for judges of this package and basic for users' code (see
    `assay.system.sandbox`). `workers=0` judges in this process without any limit: for tests and trusted judges.
    `pool="ray"` has `workers` processes on every node of a Ray cluster, whose environment variables they get.

    A judge that sees groups judges all answers to a prompt in one call, to which the time limit applies. A judge that
    is `async` judges up to 64 items concurrently in each process.
    """

    def __init__(
        self,
        judge: Judge,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_gb: float | None = 4.0,
        sandbox: Sandbox = "auto",
        pass_env: Sequence[str] = (),
        pool: Place = "local",
    ) -> None:
        if workers < 0:
            raise UserError(f"the number of judge workers must be at least 0, not {workers}")
        if not timeout_s > 0:
            raise UserError(f"the time limit of judging must be above 0 seconds, not {timeout_s}")
        if workers == 0 and sandbox == "strict":
            raise UserError("the strict sandbox needs worker processes: set reward.workers to at least 1")
        if workers == 0 and pool == "ray":
            raise UserError("reward.pool = 'ray' needs judge processes on every node: set reward.workers to at least 1")
        if workers and (least := least_timeout_s(judge)) > timeout_s:
            raise UserError(
                f"programs may run for {least - MARGIN_S:g} s (task.args.timeout_s), so judging needs a limit of "
                f"at least {least:g} s, not {timeout_s:g}: raise reward.timeout_s (assay score: --timeout)"
            )
        self._judge = judge
        self._timeout_s = timeout_s
        self._closed = False
        self._pool: WorkerPool[list[Verdict]] | None = None
        if workers:
            if pool == "local":
                _check_set(pass_env)
            self._settings = _worker_settings(judge, timeout_s, memory_gb, sandbox, pass_env)
            self._pool = _make_pool(pool, self._settings, workers, pass_env)

    def fields(self, prompt: Prompt) -> Mapping[str, Any]:
        return judged_fields(self._judge, prompt)

    def judge_groups(self, groups: Sequence[GroupItem], report: JudgeReport | None = None) -> list[list[Verdict]]:
        """Thread-safe, like `judge`."""
        if sees_group(self._judge):
            return self._judge_together(groups, report)
        separate = self._judge_together([([item[0]], *item[1:]) for item in single_items(groups)], report)
        return regroup(chain.from_iterable(separate), groups)

    def _judge_together(self, groups: Sequence[GroupItem], report: JudgeReport | None) -> list[list[Verdict]]:
        """Judge each group in one call."""
        if self._closed:
            raise RuntimeError("the judge pool is closed")
        if not groups:
            return []
        if self._pool is None:
            return self._judge_here(groups)
        try:
            arguments = [(list(texts), answer, dict(fields)) for texts, answer, fields in groups]
            results = self._pool.map(arguments, report and (lambda done: report(done, len(groups))))
        except StartFailed as error:
            raise UserError(f"the judge cannot run in a worker process: {self._with_hint(str(error))}") from None
        if report is not None:
            report(len(groups), len(groups))
        return [self._verdicts(result, len(group[0])) for result, group in zip(results, groups, strict=True)]

    def _judge_here(self, groups: Sequence[GroupItem]) -> list[list[Verdict]]:
        """Judge in this process, where nothing can end a judge that takes too long: there is a warning instead."""
        text = f"judging takes longer than {self._timeout_s:g} s per answer; in this process, nothing can end it"
        limit_s = self._timeout_s * sum(len(texts) for texts, *_ in groups)
        with warn_after(limit_s, f"{text}: make the reward function faster"):
            return resolve(together([judge_group_safely(self._judge, *group) for group in groups]))

    def close(self) -> None:
        """End the workers. Calls of `judge` that still wait in other threads fail."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()

    def _verdicts(self, result: list[Verdict] | ItemFailure, count: int) -> list[Verdict]:
        if isinstance(result, list) and len(result) != count:
            result = ItemFailure(
                timed_out=False,
                detail=f"the judge returned {plural(len(result), 'verdict')} for {plural(count, 'answer')}",
            )
        if isinstance(result, list):
            for verdict in result:
                if verdict.status is Status.ERROR:
                    verdict.detail = self._with_hint(verdict.detail)
            return result
        status, detail = Status.ERROR, self._with_hint(result.detail)
        if result.timed_out:
            judged = f"judging {count} answers together" if count > 1 else "judging"
            status, detail = Status.TIMEOUT, f"{judged} took longer than {self._settings.timeout_s:g} s"
        return [failed_verdict(self._judge, status, detail) for _ in range(count)]

    def _with_hint(self, detail: str) -> str:
        """Append the setting that allows what the sandbox refused, if that is why judging failed."""
        if self._settings.level == "off":
            return detail
        for name in _VARIABLE.findall(detail):
            if name in os.environ and name not in self._settings.environment:
                return f'{detail} (judge workers do not see {name}: set reward.pass_env = ["{name}"])'
        if self._settings.level == "strict" and _REFUSED.search(detail):
            return f"{detail} (the sandbox allows no network, files or new processes: see reward.sandbox)"
        return detail


@dataclass(frozen=True)
class JudgeInWorker:
    """Calls a judge in a worker and returns its verdicts as plain values: users' judges may return anything."""

    judge: Judge

    def prepare(self) -> None:
        prepare_judge(self.judge)

    def __call__(self, completions: Sequence[str], answer: str, fields: Mapping[str, Any]) -> Any:
        return then(judge_group_safely(self.judge, completions, answer, fields), lambda all: [*map(plain_values, all)])


def plain_values(verdict: Verdict) -> dict[str, Any]:
    reward = float(verdict.reward)
    if not is_valid_reward(reward):
        raise ValueError(f"the reward is {reward}")
    return {
        "reward": reward,
        "status": str(verdict.status.value),
        "parsed": None if verdict.parsed is None else str(verdict.parsed),
        "parts": {str(name): float(value) for name, value in verdict.parts.items()},
        "detail": str(verdict.detail),
    }


def parse_verdicts(value: Any) -> list[Verdict]:
    """Check what a worker sent as verdicts on the answers to a prompt. Raises BadMessage if it is invalid."""
    if not isinstance(value, list):
        raise BadMessage("it is not a list of verdicts")
    return [parse_verdict(verdict) for verdict in value]


def parse_verdict(value: Any) -> Verdict:
    """Check what a worker sent as verdict. Raises BadMessage if it is invalid."""
    if not isinstance(value, dict):
        raise BadMessage("it is not a verdict")
    reward, status, parsed = value.get("reward"), value.get("status"), value.get("parsed")
    parts, detail = value.get("parts"), value.get("detail")
    if type(reward) is not float or not is_valid_reward(reward) or status not in _STATUSES:
        raise BadMessage("its reward or status is invalid")
    if not isinstance(parsed, str | None) or not isinstance(detail, str) or not isinstance(parts, dict):
        raise BadMessage("its fields are not those of a verdict")
    if not all(type(part) is float for part in parts.values()):
        raise BadMessage("its parts are not numbers")
    return Verdict(reward, Status(status), parsed, parts, detail)


def _make_pool(
    pool: Place, settings: WorkerSettings, workers: int, pass_env: Sequence[str]
) -> WorkerPool[list[Verdict]]:
    if pool == "local":
        return WorkerPool(settings, workers, parse_verdicts)
    judges = importlib.import_module("assay.integrations.ray.judges")  # by name: its package is optional
    cluster_pool: WorkerPool[list[Verdict]] = judges.ClusterPool(settings, workers, parse_verdicts, pass_env)
    return cluster_pool


def _check_set(pass_env: Sequence[str]) -> None:
    unset = [name for name in pass_env if name not in os.environ]
    if unset:
        raise UserError(f"reward.pass_env names {unset[0]}, which is not set: set it, or remove it from pass_env")


def _worker_settings(
    judge: Judge, timeout_s: float, memory_gb: float | None, sandbox: Sandbox, pass_env: Sequence[str]
) -> WorkerSettings:
    function = serialized(judge)
    level = level_for(judge, sandbox)
    return WorkerSettings(
        function, timeout_s, memory_gb, level, is_user_code(judge), environment(level, pass_env), judges_async(judge)
    )


def serialized(judge: Judge) -> bytes:
    """The judge as it is sent to workers. Code that they cannot import, such as that of a notebook, goes by value."""
    try:
        return cloudpickle.dumps(JudgeInWorker(judge))
    except Exception as error:  # `__reduce__` of users' objects may raise anything
        raise UserError(
            f"this judge cannot be sent to worker processes ({describe_error(error)}): set reward.workers = 0 to judge "
            "in this process, without isolation"
        ) from None


def level_for(judge: Any, sandbox: Sandbox) -> Level:
    automatic: Level = "basic" if is_user_code(judge) else "strict"
    return automatic if sandbox == "auto" else sandbox


def least_timeout_s(judge: Any) -> float:
    """Return the shortest sensible time limit of judging: the limit of programs plus the time to start and stop them.

    With a shorter one, a program that never ends would cost its worker process instead of ending by itself.
    """
    shortest = judge.timeout_s + MARGIN_S if isinstance(judge, CodeJudge) else 0.0
    return max([shortest, *map(least_timeout_s, inner_judges(judge))])


def is_user_code(judge: Any) -> bool:
    """Return whether judging runs code that is not part of this package."""
    module = judge.__module__ if hasattr(judge, "__qualname__") else type(judge).__module__
    if isinstance(judge, FunctionJudge) or module.partition(".")[0] != "assay":
        return True
    return any(map(is_user_code, inner_judges(judge)))


class JudgeModel(Judging):
    """A model as judge, which reads the conversation and judges each answer by itself."""

    wants_prompt = True

    @abstractmethod
    def describe_usage(self) -> str:
        """What the model has been asked so far, for people."""

    def fields(self, prompt: Prompt) -> Mapping[str, Any]:
        return judged_fields(self, prompt)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return self.judge([(completion, answer, fields)])[0]

    @abstractmethod
    def judge(self, items: Sequence[Item], report: JudgeReport | None = None) -> list[Verdict]: ...

    def judge_groups(self, groups: Sequence[GroupItem], report: JudgeReport | None = None) -> list[list[Verdict]]:
        return regroup(self.judge(single_items(groups), report), groups)


PART = "judge"  # name of the model's reward in `Verdict.parts`


class JudgePanel(Judging):
    """reward = reward of the verifiers + weight x reward of the model.

    The verifiers' weights are part of their reward. With `mix`, the model decides status and parsed answer, and `mix`
    computes its reward; without, the verifiers decide them. If the model fails or does not answer in time, the status
    is error: such an answer is not trained on. The model is never asked in a worker process: workers have no network,
    and must not see the API key.
    """

    def __init__(
        self,
        model: JudgeModel,
        weight: float = 1.0,
        verifiers: JudgePool | None = None,
        mix: RewardMix | None = None,
    ) -> None:
        assert verifiers is not None or mix is not None
        self.model, self.weight, self.verifiers, self.mix = model, weight, verifiers, mix

    def close(self) -> None:
        try:
            self.model.close()
        finally:
            if self.verifiers is not None:
                self.verifiers.close()

    def describe_usage(self) -> str:
        return self.model.describe_usage()

    def fields(self, prompt: Prompt) -> Mapping[str, Any]:
        return self.model.fields(prompt)

    def judge_groups(self, groups: Sequence[GroupItem], report: JudgeReport | None = None) -> list[list[Verdict]]:
        verified = self.verifiers.judge_groups(groups) if self.verifiers is not None else None
        judged = self.model.judge_groups(groups, report)
        combined = []
        for index, (texts, *_) in enumerate(groups):
            first = verified[index] if verified is not None else [None] * len(texts)
            combined.append(list(map(self._sum, first, judged[index], texts)))
        return combined

    def _sum(self, verified: Verdict | None, judged: Verdict, completion: str) -> Verdict:
        if judged.status in (Status.ERROR, Status.TIMEOUT):
            parsed, parts = (verified.parsed, verified.parts) if verified is not None else (None, {})
            return Verdict(0.0, Status.ERROR, parsed, dict(parts), f"{PART}: {judged.detail}")
        shaped = self.mix.shape(judged, completion) if self.mix is not None else judged
        parts = {**(verified.parts if verified is not None else {}), **shaped.parts, PART: shaped.reward}
        if verified is None:
            return Verdict(self.weight * shaped.reward, shaped.status, shaped.parsed, parts)
        if verified.status is Status.ERROR:
            return Verdict(0.0, Status.ERROR, verified.parsed, parts, verified.detail)
        first = shaped if self.mix is not None else verified
        reward = verified.reward + self.weight * shaped.reward
        return Verdict(reward, first.status, first.parsed, parts, first.detail)
