"""Trackers: what they get, that a failure does not end a run, and the real packages on local files."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from algos_parts import make_group
from small_run import SmallRuns

from assay.config import LogConfig
from assay.runs import Run
from assay.runs import trackers as module
from assay.runs.trackers import COLUMNS, Trackers
from assay.types import UserError

METRICS = {"reward/mean": 0.5, "eval/pass@1": 0.25, "bad": float("nan"), "text": "x"}
NUMBERS = {"reward/mean": 0.5, "eval/pass@1": 0.25}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run.create(tmp_path, "tracked", 'seed = 1\n[judge]\nurl = "http://me:secret@host/"\n') as run:
        yield run


def log_twice(cfg: LogConfig, run: Run) -> None:
    """Two sessions: the second one is of a resumed run."""
    for step in (1, 2):
        with Trackers.start(cfg, run, pytest.fail) as trackers:
            trackers.log(step, METRICS)
            trackers.log_rollouts(step, [make_group("p", [(0.0, 3), (1.0, 3)]), make_group("p", [(0.5, 3)])])


class StandIn:
    """Records its calls in `calls`; raises after `works` of them."""

    def __init__(self, calls: list[tuple[Any, ...]], works: int = 1000) -> None:
        self.calls, self.works = calls, works

    def _record(self, *call: Any) -> None:
        if len(self.calls) == self.works:
            raise ConnectionError("the server is gone")
        self.calls.append(call)

    def log(self, step: int, metrics: Any) -> None:
        self._record("log", step, metrics)

    def log_rollouts(self, step: int, table: Any) -> None:
        self._record("rollouts", step, table)

    def close(self, failed: bool) -> None:
        self._record("close", failed)


def test_a_tracker_that_fails_is_reported_once_and_the_others_get_everything() -> None:
    warnings: list[str] = []
    calls: list[tuple[Any, ...]] = []
    active = {"Broken": StandIn([], works=0), "Good": StandIn(calls)}
    with pytest.raises(ValueError), Trackers(active, warnings.append) as trackers:
        trackers.log(1, METRICS)
        trackers.log(2, {})
        raise ValueError
    assert calls == [("log", 1, NUMBERS), ("log", 2, {}), ("close", True)]
    (warning,) = warnings
    assert "Broken failed" in warning and "the server is gone" in warning


def test_the_table_has_the_chosen_number_of_rollouts_from_all_groups() -> None:
    calls: list[tuple[Any, ...]] = []
    groups = [make_group("p", [(0.0, 3), (0.25, 3)]), make_group("p", [(0.5, 3), (1.0, 3)])]
    for count in (0, 2, 100):
        Trackers({"Good": StandIn(calls)}, pytest.fail, count).log_rollouts(7, groups)
    rows = [table for _, _, table in calls]
    assert [len(table) for table in rows] == [2, 4] and len(rows[0][0]) == len(COLUMNS)
    assert [row[4] for row in rows[0]] == [0.0, 0.5] and [row[4] for row in rows[1]] == [0.0, 0.25, 0.5, 1.0]


def test_a_run_and_its_resumption_log_all_steps(small: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(module.TRACKERS, "trackio", ("Stand-in", "json", lambda project, run: StandIn(calls)))
    assert small.train("--log.trackio", "p", "--log.rollouts", 2, "--train.steps", 1) == 0
    assert calls[-1] == ("close", False)
    assert small.resume("small", "--train.steps", 2) == 0
    assert [call[1] for call in calls if call[0] == "rollouts"] == [1, 2]
    assert {call[1] for call in calls if call[0] == "log" and "reward/mean" in call[2]} == {1, 2}


def test_missing_packages_name_their_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Trackers.start(LogConfig(), run, pytest.fail).active
    for name in module.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        cfg = LogConfig.model_validate({name: True if name == "tensorboard" else "project"})
        with pytest.raises(UserError, match=rf"assay-rl\[{name}\]"):
            Trackers.start(cfg, run, pytest.fail)


@pytest.mark.slow
def test_tensorboard_files_hold_the_numbers(run: Run) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice(LogConfig(tensorboard=True, rollouts=2), run)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == [*NUMBERS] and events.Tags()["tensors"] == ["rollouts/text_summary"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.5)]


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of an offline run: after a header, blocks of 32 KiB in the format of LevelDB's logs."""
    place, parts = 7, b""
    while place < len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_offline_continues_the_same_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_twice(LogConfig(wandb="team/project", rollouts=2), run)
    wandb.teardown()
    files = sorted((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.stem for file in files}) == 1 and "tracked-" in files[0].stem
    records = [Record.FromString(content) for file in files for content in wandb_records(file.read_bytes())]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(r.entity, r.project, r.display_name) for r in runs} == {("team", "project", "tracked")}
    items = [{item.key or item.nested_key[0]: item.value_json for item in r.history.item} for r in records]
    assert [item["reward/mean"] for item in items if "reward/mean" in item] == ["0.5", "0.5"]
    assert sum("rollouts" in item for item in items) == 2
    assert "secret" not in str(records)


@pytest.mark.slow
def test_mlflow_files_continue_the_same_run(run: Run, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    client.create_experiment("assay", artifact_location=f"file://{tmp_path}/artifacts")
    log_twice(LogConfig(mlflow=uri, rollouts=2), run)
    (found,) = client.search_runs([client.get_experiment_by_name("assay").experiment_id])
    assert found.info.run_name == "tracked" and found.info.status == "FINISHED"
    assert found.data.params["seed"] == "1" and "secret" not in str(found.data.params)
    history = client.get_metric_history(found.info.run_id, "eval/pass_at_1")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.25)]
    assert len(list((tmp_path / "artifacts").rglob("rollouts/step-*.jsonl"))) == 2


@pytest.mark.slow
def test_trackio_files_continue_the_same_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    log_twice(LogConfig(trackio="project", rollouts=2), run)
    (name,) = SQLiteStorage.get_runs("project")
    rows = SQLiteStorage.get_logs("project", name)
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [(1, 0.5), (2, 0.5)]
    assert sum("rollouts" in row for row in rows) == 2
