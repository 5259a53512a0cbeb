"""Runs on real Ray clusters: equal to those of torchrun, with changing servers, and without keys in logs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
import yaml
from cluster_parts import MARK, ClusterRun, Nodes, commands, environment
from safetensors.torch import load_file
from small_run import SmallRuns
from waiting import comes_true

from assay.runs.rollouts import read_rollouts

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
ROOT = Path(__file__).parents[2]
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
    """In a Ray of the run alone, which nobody else can reach, and whose logs have no keys."""
    runs, others = SmallRuns(tmp_path), ray_processes()
    words = ["--train.steps", 400, "--source", "async", "--engine", "assay", "--eval.every", 0, "--save.every", 100]
    with closing(ClusterRun(runs, *words, "--cluster.engines", 1)) as run:
        run.reach(2, serving=1)
        assert listening_addresses(run.servers()) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
        mine = ray_processes() - others
        assert mine and all(b"RAY_USAGE_STATS_ENABLED=0" in environment(pid) for pid in mine)
        for engines in (3, 1):
            set_engines(run, engines)
            run.wait_until(lambda wanted=engines: run.last.get("servers/serving") == wanted)
            run.reach(run.steps + 2)
            assert len(run.servers()) == engines
            check_secrecy_of_keys(run)
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


def check_secrecy_of_keys(run: ClusterRun) -> None:
    """The keys of servers are in no log of Ray, file of the run, or command line."""
    prefix = b"ASSAY_SERVER_KEY="
    keys = [line.removeprefix(prefix) for pid in run.servers() for line in environment(pid) if line.startswith(prefix)]
    assert len(keys) == len(run.servers()) and all(len(key) > 10 for key in keys)
    session = Path("/tmp/ray/session_latest").resolve()
    texts = [line.encode() for line in commands().values()]
    for file in (*session.rglob("*"), *run.path.rglob("*"), run.output):
        with suppress(OSError):  # folders, sockets, and files that are replaced
            texts.append(file.read_bytes())
    assert not any(key in text for key in keys for text in texts) and any(b"assay serve" in text for text in texts)


def ray_processes() -> set[int]:
    ours = {pid for pid, line in commands().items() if re.search(r"gcs_server|raylet", line)}
    return {pid for pid in ours if MARK.encode() in environment(pid)}


def listening_addresses(servers: list[int]) -> set[str]:
    """Addresses on which processes of Ray and engine servers listen."""
    mine = "|".join(["ray", "gcs_server", *(f"pid={pid}," for pid in servers)])
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0].strip("[]") for line in lines if re.search(mine, line)}


def test_the_file_for_a_cloud_fits_the_schema_of_ray() -> None:
    from ray.autoscaler._private.util import validate_config

    config = yaml.safe_load((ROOT / "deploy/ray-cluster-aws.yaml").read_text())
    validate_config({**config, "cluster_synced_files": []})  # which `ray up` adds
