"""Runs on real Ray clusters: equal to those of torchrun, with changing servers, and without keys in logs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from cluster_parts import MARK, ClusterRun, Nodes, commands, environment
from safetensors.torch import load_file
from small_run import SmallRuns
from waiting import comes_true

from assay.runs.rollouts import read_rollouts

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
FLOAT64 = ["--dtype", "float64", "--engine.dtype", "float64"]


def test_a_run_on_three_nodes_equals_that_of_torchrun(
    tmp_path: Path, cluster: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = SmallRuns(tmp_path)
    words = ["--train.steps", 4, "--train.prompts", 4, "--engine", "assay", *FLOAT64]
    launched = runs.launch(2, "train", runs.config, "--name", "torchrun", *words, "--server.servers", 2)
    said, _ = launched.communicate(timeout=240)
    assert launched.returncode == 0, said
    sizes = ["--cluster.learners", 2, "--cluster.engines", 2, "--cluster.spread", "true"]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with closing(ClusterRun(runs, "--cluster.address", "auto", *sizes, *words)) as run:
        assert run.ended() == 0, run.said
    assert "joining the Ray cluster" in run.said and "Traceback" not in run.said
    mine, other = (
        load_file(runs.checkpoint(4, name) / "model" / "model.safetensors") for name in ("small", "torchrun")
    )
    assert mine.keys() == other.keys()
    assert max(float((mine[key] - other[key]).abs().max()) for key in mine) < 1e-9
    for step in range(1, 5):
        pair = [read_rollouts(runs.runs / name, step) for name in ("small", "torchrun")]
        texts = [
            [rollout.turns[-1].completion.token_ids for group in groups for rollout in group.rollouts]
            for groups in pair
        ]
        assert texts[0] == texts[1]


def test_the_number_of_servers_follows_the_settings(tmp_path: Path) -> None:
    """In a Ray of the run alone, which nobody else can reach."""
    runs, others = SmallRuns(tmp_path), ray_processes()
    words = ["--train.steps", 400, "--source", "async", "--engine", "assay", "--eval.every", 0, "--save.every", 100]
    with closing(ClusterRun(runs, *words, "--cluster.engines", 1)) as run:
        run.reach(2, serving=1)
        assert listening_addresses(run.servers()) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        for engines in (3, 1):
            set_engines(run, engines)
            run.wait_until(lambda wanted=engines: run.last.get("servers/serving") == wanted)
            run.reach(run.steps + 2)
            assert len(run.servers()) == engines
        run.process.send_signal(signal.SIGTERM)
        assert run.ended() == 143, run.said
        assert "to resume from there" in run.said
        assert comes_true(lambda: ray_processes() <= others, 20)  # it has ended, and no other one was started
    assert run.last["servers/failures"] == 0 and "Traceback" not in run.said


def set_engines(run: ClusterRun, count: int) -> None:
    file = run.path / "config.toml"
    text, found = re.subn(r"(?m)^engines = \d+$", f"engines = {count}", file.read_text())
    assert found == 1
    (run.path / "new.toml").write_text(text)
    os.replace(run.path / "new.toml", file)


def ray_processes() -> set[int]:
    ours = {pid for pid, line in commands().items() if re.search(r"gcs_server|raylet", line)}
    return {pid for pid in ours if MARK.encode() in environment(pid)}


def listening_addresses(servers: list[int]) -> set[str]:
    """Addresses on which processes of Ray and engine servers listen."""
    mine = "|".join(["ray", "gcs_server", *(f"pid={pid}," for pid in servers)])
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0].strip("[]") for line in lines if re.search(mine, line)}


def test_keys_are_not_in_the_logs_of_ray(tmp_path: Path) -> None:
    runs = SmallRuns(tmp_path)
    words = ["--train.steps", 300, "--engine", "assay", "--eval.every", 0, "--cluster.engines", 1]
    with closing(ClusterRun(runs, *words)) as run:
        run.reach(1, serving=1)
        variables = environment(run.servers()[0])
        key = next(line.partition(b"=")[2] for line in variables if line.startswith(b"ASSAY_SERVER_KEY="))
        assert len(key) > 10
        session = Path("/tmp/ray/session_latest").resolve()
        files = [*session.rglob("*"), *(tmp_path / "runs").rglob("*"), run.output]
        holding = [file for file in files if file.is_file() and key in file.read_bytes()]
        assert len(files) > 10 and not holding
        assert not [line for line in commands().values() if key.decode() in line]
