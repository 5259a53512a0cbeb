"""The engine vllm with servers that Ray starts: in actors of a run with cluster.kind = "ray"."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from cluster_parts import ClusterRun, environment
from real_server import CUDA, FEW, ROOT, finish
from small_run import SmallRuns

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.skipif(CUDA, reason="needs a GPU for the learner and one for the server, or CPUs")
def test_a_server_in_an_actor_samples_with_the_weights_of_the_learner(vllm_python: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the package ray")
    small = SmallRuns(tmp_path)
    small.config = ROOT / "configs/demo.toml"
    words = [*FEW, "--engine", "vllm", "--vllm.python", vllm_python, "--model", "preset:tiny", "--sft.steps", 2]
    with closing(ClusterRun(small, *words, "--cluster.engines", 1)) as run:
        run.wait_until(lambda: bool(run.servers("vllm")), 300)
        packages = [line for line in environment(run.servers("vllm")[0]) if line.startswith(b"PYTHONPATH=")]
        assert b"site-packages" not in packages[0]  # those of the learner are of another environment
        finish(run.process, small, "small")
        assert "failed" not in run.said and "Traceback" not in run.said, run.said
