"""Runs whose servers fail: they use the others or wait, and end as if nothing had happened; or they save and stop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from gateway import Gateway
from serve_parts import save_folder, serving, tiny_model
from small_run import SmallRuns, inject

from assay.engine.remote import base
from assay.engine.remote.assay import AssayEngine
from assay.runs import checkpoints
from assay.runs.rollouts import read_rollouts
from assay.training import run as train_run
from assay.training.run import TrainingRun

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS, PROMPTS, EVALUATED = 3, 3, 5  # requests of the run: EVALUATED, STEPS times PROMPTS, EVALUATED


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ATTEMPTS", 2)
    monkeypatch.setattr(train_run, "PAUSES_S", (0.05, 0.1))


@contextmanager
def gateway() -> Iterator[Gateway]:
    """Leads to a server; after `fail` and `mend`, to another one, which has not received any weights."""
    http = {"allow_updates": True, "drain_s": 1}
    with serving(tiny_model(1), http) as first, serving(tiny_model(2), http) as second:
        made = Gateway(urlsplit(first.url).port or 0)
        made.restarted = urlsplit(second.url).port  # type: ignore[attr-defined]
        try:
            yield made
        finally:
            made.close()


def fail(to: Gateway) -> None:
    """Connections are lost and refused from now on."""
    to.target = to.restarted  # type: ignore[attr-defined]
    to.listener.shutdown(2)
    to.listener.close()
    to.cut()


def mend(to: Gateway) -> None:
    to.listener = to._listen()


def restart_at(patch: pytest.MonkeyPatch, to: Gateway, method: str, call: int) -> None:
    """The server fails at this call of a method of the engine, and is back soon after the run has noticed."""
    inject(patch, AssayEngine, method, call, lambda: fail(to))
    inject(patch, TrainingRun, "_recover", 1, threading.Timer(0.2, mend, [to]).start)


class Runs(SmallRuns):
    def train_with(self, servers: Sequence[Gateway], name: str, *words: Any) -> int:
        urls = json.dumps([server.url for server in servers])
        settings = ["--engine", "assay", "--server.urls", urls, "--engine.dtype", "float32"]
        lengths = ["--eval.every", 0, "--save.every", 100, "--train.steps", STEPS]
        return self.train("--model", self.folder / "model", "--name", name, *settings, *lengths, *words)

    def timeless(self, name: str = "small") -> list[dict[str, Any]]:
        changing = ("async/", "weights/changed")  # a step whose weights reach no server is recorded without the latter
        return [{k: v for k, v in row.items() if not k.startswith(changing)} for row in super().timeless(name)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Has a run without failures, named usual."""
    runs = Runs(tmp_path_factory.mktemp("lost"))
    save_folder(tiny_model(0), runs.folder / "model")
    with gateway() as server:
        assert runs.train_with([server], "usual") == 0
    return runs


@pytest.mark.parametrize(
    ("name", "method", "call", "source"),
    [
        ("step-2", "_sample", EVALUATED + PROMPTS + 2, "on_policy"),
        ("asynchronous", "_sample", EVALUATED + PROMPTS + 2, "async"),
        ("weights-2", "_publish", 3, "on_policy"),
        ("repeated", "_sample", EVALUATED + STEPS * PROMPTS + EVALUATED + 2, "on_policy"),
    ],
)
def test_a_run_whose_only_server_is_restarted_equals_one_without_a_failure(
    small: Runs, monkeypatch: pytest.MonkeyPatch, name: str, method: str, call: int, source: str
) -> None:
    with gateway() as server:
        restart_at(monkeypatch, server, method, call)
        if name == "repeated":  # the file of the first evaluation is lost before the last one
            lost = small.runs / name / "evals" / "step-000000-before-test.jsonl"
            inject(monkeypatch, TrainingRun, "finish", 1, lost.unlink)
        assert small.train_with([server], name, "--source", source, "--source.max_staleness", 0) == 0
        assert server.target == server.restarted  # type: ignore[attr-defined]
    small.same_run("usual", name, STEPS)


def test_an_asynchronous_run_trains_every_group_once(small: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway() as server:
        restart_at(monkeypatch, server, "_sample", EVALUATED + 2 * PROMPTS + 1)
        assert small.train_with([server], "stale", "--source", "async", "--source.max_staleness", 2) == 0
        assert server.target == server.restarted  # type: ignore[attr-defined]
    groups = [group for step in range(1, STEPS + 1) for group in read_rollouts(small.runs / "stale", step)]
    assert len({group.prompt.id for group in groups}) == len(groups) == STEPS * PROMPTS


def test_a_run_whose_server_stays_away_is_saved_and_can_be_resumed(
    small: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with gateway() as server:
        with monkeypatch.context() as patch:
            inject(patch, AssayEngine, "_sample", EVALUATED + PROMPTS + 2, lambda: fail(server))
            assert small.train_with([server], "saved", "--server.recover_s", 0.3) == 2
        said = capsys.readouterr().err
        assert "is not reachable" in said and "assay train --resume" in said and said.count("\n") == 1
        assert checkpoints.last(small.runs / "saved") == 1  # the last complete step, though no checkpoint was due
        mend(server)
        assert small.resume("saved") == 0
    for step in range(1, STEPS + 1):
        assert read_rollouts(small.runs / "usual", step) == read_rollouts(small.runs / "saved", step)


def test_without_time_to_recover_a_failure_ends_the_run_at_once(small: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway() as server:
        inject(monkeypatch, AssayEngine, "_sample", EVALUATED + PROMPTS + 2, lambda: fail(server))
        assert small.train_with([server], "ended", "--server.recover_s", 0) == 2
    assert checkpoints.last(small.runs / "ended") == 0
