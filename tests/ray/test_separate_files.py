"""Engine servers on a node that shares no files with the learner: model and weights go through Ray's object store."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from cluster_parts import ClusterRun, SeparateNodes, outer_address
from safetensors.torch import load_file
from small_run import SmallRuns

from assay.runs.rollouts import read_rollouts

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 4


def can_separate() -> bool:
    """Whether file systems can be mounted for some processes alone, and this machine has an address for others."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return mounted and not outer_address().startswith("127.")
    except OSError:
        return False


@pytest.mark.skipif(not can_separate(), reason="needs the right to mount file systems, and a network")
def test_servers_on_a_node_without_shared_files_get_model_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    runs = SmallRuns(folder)
    words = ["--train.steps", STEPS, "--train.prompts", 4, "--engine", "assay", "--dtype", "float64"]
    words += ["--engine.dtype", "float64"]
    alone = runs.process("train", runs.config, "--name", "alone", *words, "--server.servers", 2)
    said, _ = alone.communicate(timeout=240)
    assert alone.returncode == 0, said
    temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path, for sockets
    monkeypatch.setenv("TMPDIR", str(temporary))
    # The learner fits on the head alone, and leaves no room there.
    sizes = ["--cluster.cpus_per_learner", 3, "--cluster.cpus_per_engine", 1, "--cluster.engines", 2]
    with closing(SeparateNodes((3, 2), [folder, temporary], tmp_path / "node.txt")) as nodes:
        with closing(ClusterRun(runs, *words, *sizes, "--cluster.address", nodes.address)) as run:
            run.reach(1)
            servers = [Path(f"/proc/{pid}/root") for pid in run.servers()]
            models = [inside(root, temporary).glob("assay-servers-*/model/config.json") for root in servers]
            assert len(servers) == 2 and all(map(list, models))
            assert not any(inside(root, runs.runs).exists() for root in servers)
            assert run.ended() == 0, run.said
            assert "failed" not in run.said and "Traceback" not in run.said
        lose_server_and_memory(runs, nodes)
    shutil.rmtree(temporary, ignore_errors=True)
    mine, other = (
        load_file(runs.checkpoint(STEPS, name) / "model" / "model.safetensors") for name in ("small", "alone")
    )
    assert mine.keys() == other.keys()
    assert max(float((mine[key] - other[key]).abs().max()) for key in mine) < 1e-9
    for step in range(1, STEPS + 1):
        assert answers(runs, "small", step) == answers(runs, "alone", step)


def lose_server_and_memory(runs: SmallRuns, nodes: SeparateNodes) -> None:
    """A new server gets the weights. Where they cannot be written, the run ends with one line."""
    words = ["--train.steps", 1000, "--source", "async", "--engine", "assay", "--eval.every", 0]
    words += ["--cluster.cpus_per_learner", 3, "--cluster.cpus_per_engine", 1, "--cluster.engines", 2]
    with closing(ClusterRun(runs, *words, "--cluster.address", nodes.address, name="long")) as run:
        run.reach(2, serving=2)
        os.kill(run.servers()[0], signal.SIGKILL)
        run.wait_until(lambda: run.said.count("serves again") == 1)
        run.reach(run.steps + 2, serving=2)
        enter = ["nsenter", "--target", str(nodes.node.pid), "--mount"]
        subprocess.run([*enter, "mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], check=True)
        assert run.ended() == 2
        assert f"cannot write weights on node {nodes.NODE} (OSError: " in run.said.splitlines()[-1], run.said
        assert "Traceback" not in run.said


def inside(root: Path, path: Path) -> Path:
    """A path as a process sees it. `root`: its root."""
    return root / os.path.relpath(path, "/")


def answers(runs: SmallRuns, name: str, step: int) -> list[list[int]]:
    groups = read_rollouts(runs.runs / name, step)
    return [list(rollout.turns[-1].completion.token_ids) for group in groups for rollout in group.rollouts]
