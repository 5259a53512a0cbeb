"""The run directory: its lock, metrics and environment.json."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy
import pytest

import assay
from assay.runs import Run, checkpoints, write_rollouts
from assay.runs.directory import list_runs
from assay.runs.environment import describe_environment, memory_gib, version_of
from assay.runs.rollouts import rollout_steps
from assay.types import UserError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, "demo", "seed = 1\n")


def test_create_writes_config_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create(tmp_path, "demo", "seed = 1\n")
    assert (run.path / "config.toml").read_text() == "seed = 1\n"
    environment, exact = json.loads((run.path / "environment.json").read_text()), memory_gib(digits=9)
    versions, machine = environment["versions"], environment["machine"]
    assert versions["assay"] == assay.__version__ and versions["numpy"] == numpy.__version__
    assert versions["python"] == sys.version.split()[0] and version_of("no-such-package") is None
    assert machine["cores"] == os.cpu_count() and machine["usable_cores"] == len(os.sched_getaffinity(0))
    assert exact is not None and machine["memory_gib"] == round(exact, 1) and memory_gib() == round(exact)
    assert environment["command"] == sys.argv and environment["folder"] == str(tmp_path)
    assert environment["started"].endswith("+00:00") and environment["git"] is None  # not in a repository


def test_the_number_of_threads_is_recorded_for_each_session(run: Run) -> None:
    run.record_threads(1)
    run.write_environment()
    run.record_threads(4)
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["threads"] == 1 and [session["threads"] for session in environment["resumed"]] == [4]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("precious")
    assert Run.create(tmp_path, "empty", "").name == "empty"
    assert [Run.create(tmp_path, "full", "").name for _ in range(2)] == ["full-2", "full-3"]
    assert Run.create(tmp_path, "file", "").name == "file-2"
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes.txt").read_text() == "precious"
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def _create_together(runs_dir: Path, barrier: Barrier, number: int) -> None:
    barrier.wait()
    Run.create(runs_dir, "race", f"number = {number}\n")


def test_concurrent_processes_create_different_runs(tmp_path: Path) -> None:
    (tmp_path / "race").mkdir()  # empty: all of them want this one
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    creators = [context.Process(target=_create_together, args=(tmp_path, barrier, n)) for n in range(8)]
    for creator in creators:
        creator.start()
    for creator in creators:
        creator.join(30)
    assert [creator.exitcode for creator in creators] == [0] * 8
    assert {path.name for path in tmp_path.iterdir()} == {"race", *(f"race-{n}" for n in range(2, 9))}
    configs = {(path / "config.toml").read_text() for path in tmp_path.iterdir()}
    assert configs == {f"number = {n}\n" for n in range(8)}


@pytest.mark.parametrize("name", ["", "..", "a/b", "a@b", ".hidden", "a b", "x" * 300])
def test_invalid_run_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot name a run"):
        Run.create(tmp_path, name, "")
    assert not any(tmp_path.iterdir())


def test_an_unwritable_runs_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot create a run in"):
        Run.create(tmp_path / "file" / "runs", "demo", "")
    with pytest.raises(UserError, match="not a run directory"):
        Run.open(tmp_path)


def test_a_full_disk_leaves_the_run_name_free(tmp_path: Path) -> None:
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, most))
    try:
        with pytest.raises(UserError, match="cannot create a run in"):
            Run.create(tmp_path, "demo", "seed = 1\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert list_runs(tmp_path) == []
    assert Run.create(tmp_path, "demo", "seed = 1\n").name == "demo"


def test_metrics_round_trip(run: Run) -> None:
    run.log(1, {"reward/mean": 0.25, "eval/accuracy": math.nan, "optim/grad_norm": math.inf})
    run.log(2, {"reward/mean": 0.5})
    text = (run.path / "metrics.jsonl").read_text()  # flushed, without closing
    assert len(text.splitlines()) == 2
    assert "NaN" in text
    first, second = run.read_metrics()
    assert first["step"] == 1
    assert math.isnan(first["eval/accuracy"])
    assert first["optim/grad_norm"] == math.inf
    assert second == {"step": 2, "reward/mean": 0.5}


def test_an_incomplete_last_line_is_ignored_and_replaced(run: Run) -> None:
    run.log(1, {"reward/mean": 1.0})
    run.close()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/me')
    again = Run.open(run.path)
    assert [row["step"] for row in again.read_metrics()] == [1]
    again.log(2, {"reward/mean": 2.0})
    assert [row["step"] for row in again.read_metrics()] == [1, 2]
    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize("line", ["{", "[]", '{"reward/mean": 1}', ""])
def test_damaged_lines_are_reported_with_their_number(run: Run, line: str) -> None:
    (run.path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match="line 2"):
        run.read_metrics()


def test_truncate_after_deletes_later_files_and_lines(run: Run) -> None:
    for step in range(1, 7):
        run.log(step, {"reward/mean": step / 10, "odd": math.nan})
        write_rollouts(run.path, step, [])
        write_rollouts(run.path, step, [], kind="eval", split="test")
        write_rollouts(run.path, step, [], kind="skipped")
        with checkpoints.saving(run.path, step) as folder:
            (folder / "state.json").write_text(str(step))
    checkpoints.set_best(run.path, 5, 0.9)
    run.write_summary({"steps": 6})
    run.truncate_after(6)
    assert run.read_summary() == {"steps": 6}
    before = (run.path / "metrics.jsonl").read_text().splitlines()
    for _ in range(2):  # it may be cut off itself, and is then done again
        run.truncate_after(4)
        assert (run.path / "metrics.jsonl").read_text().splitlines() == before[:4]
        kinds = [rollout_steps(run.path, kind) for kind in ("train", "eval", "skipped")]
        assert [*kinds, checkpoints.steps(run.path)] == [[1, 2, 3, 4]] * 4
    assert {path.name for path in (run.path / "rollouts").iterdir()} == {
        f"step-00000{step}.{suffix}" for step in range(1, 5) for suffix in ("jsonl", "npz")
    }
    assert checkpoints.read_best(run.path) is None
    assert run.read_summary() == {}
    run.log(5, {"reward/mean": 0.5})  # the open file must be the new one
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4, 5]


def test_truncate_after_changes_nothing_if_metrics_are_damaged(run: Run) -> None:
    for step in (1, 2):
        run.log(step, {"reward/mean": 0.5})
        with checkpoints.saving(run.path, step) as folder:
            (folder / "state.json").write_text("{}")
    run.write_summary({"steps": 2})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write("not a line of metrics\n")
    with pytest.raises(UserError, match="line 3"):
        run.truncate_after(1)
    assert checkpoints.steps(run.path) == [1, 2] and run.read_summary() == {"steps": 2}


def test_truncate_after_deletes_lines_logged_after_the_checkpoint(run: Run) -> None:
    run.log(1, {"reward/mean": 0.5})
    run.log(2, {"reward/mean": math.nan})
    with checkpoints.saving(run.path, 2) as folder:
        (folder / "state.json").write_text("{}")
    saved = (run.path / "metrics.jsonl").read_bytes()
    run.log(2, {"after/accuracy": 0.5})
    run.log(3, {"reward/mean": 0.5})
    run.truncate_after(2)
    assert (run.path / "metrics.jsonl").read_bytes() == saved


_HOLDER = """
import sys, time
from pathlib import Path
from assay.runs.directory import Run
run = Run.create(Path(sys.argv[1]), "held", "")
print("ready", flush=True)
time.sleep(60)
"""


def test_one_writer_at_a_time_and_the_lock_is_released_on_death(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "ready\n"
        run = Run.open(tmp_path / "held")  # reading is free
        assert run.state == "running"
        with pytest.raises(UserError, match=f"written by process {holder.pid}"):
            Run.open(tmp_path / "held", write=True)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert run.state == "stopped"
    resumed = Run.open(tmp_path / "held", write=True)
    assert resumed.state == "running"
    assert len(json.loads((run.path / "environment.json").read_text())["resumed"]) == 1
    resumed.write_summary({"steps": 1})
    resumed.close()
    assert resumed.state == "finished"


def test_reading_runs_and_the_api_need_neither_torch_nor_matplotlib_until_they_are_used() -> None:
    modules = "assay.runs, assay.runs.console, assay.runs.metrics, assay.cli.runs, assay.cli.export, assay.api.session"
    script = f"import sys, {modules}; assert not {{'torch', 'matplotlib', 'wandb'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_list_runs_oldest_first(tmp_path: Path) -> None:
    for age, name in ((1, "b"), (3, "c"), (2, "a")):
        run = Run.create(tmp_path, name, "")
        os.utime(run.path / "config.toml", (1e9 - age, 1e9 - age))
    (tmp_path / "not-a-run").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["c", "a", "b"]
    assert list_runs(tmp_path / "nowhere") == []


def test_resuming_deletes_temporary_files_and_nothing_else(run: Run) -> None:
    run.close()
    leftovers = [".summary.json.tmp-12", ".config.toml.tmp-12", ".curves.png.tmp-4", "checkpoints/.best.json.tmp-12"]
    folders = [".saving-reference", ".deleting-base", "checkpoints/.saving-step-000004"]
    kept = ["notes.txt", ".notes.tmp", ".summary.json.tmp-mine", "summary.json.tmp-12"]
    for name in (*leftovers, *kept, *(f"{folder}/model.safetensors" for folder in folders)):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("x")
    before = {path for path in run.path.rglob("*") if path.is_file()}
    with Run.open(run.path, write=True):
        gone = before - set(run.path.rglob("*"))
    assert {path.relative_to(run.path).as_posix() for path in gone} == {
        *leftovers,
        *(f"{folder}/model.safetensors" for folder in folders),
    }
    assert not any((run.path / folder).exists() for folder in folders)


_DYING_CREATOR = """
import os, signal, sys
from pathlib import Path
from assay.runs import Run
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
Run.create(Path(sys.argv[1]), "demo", "seed = 1\\n")
"""


def test_a_crash_before_the_config_is_written_leaves_the_name_free(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _DYING_CREATOR, str(tmp_path)], check=False)
    assert done.returncode == -9 and len(list((tmp_path / "demo").iterdir())) == 2  # the lock and a temporary file
    run = Run.create(tmp_path, "demo", "seed = 2\n")
    assert run.name == "demo" and run.config_toml == "seed = 2\n"
    assert {path.name for path in run.path.iterdir()} == {".lock", "config.toml", "environment.json"}


def test_git_state_tells_whether_files_differ_from_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("one")
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "file"], [*user, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], check=True)
    state = describe_environment()["git"]
    assert len(state["commit"]) == 40 and not state["dirty"]
    (tmp_path / "file").write_text("two")
    assert describe_environment()["git"] == {**state, "dirty": True}


def test_concurrent_threads_create_different_runs(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda number: Run.create(tmp_path, "race", f"n = {number}\n"), range(4)))
    assert {run.name for run in runs} == {"race", "race-2", "race-3", "race-4"}
    assert sorted(run.config_toml for run in runs) == [f"n = {number}\n" for number in range(4)]
