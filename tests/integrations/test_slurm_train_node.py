"""Exit codes of torchrun on one node of a Slurm job, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The launcher sends SIGTERM to the other rank as soon as one has ended; `assay` ignores it once it is about to exit.
# Ranks stop together, so none of them may still be starting then.
STOP = "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet(); sys.exit(143)"
MEET = """
def meet():
    open(f"{sys.argv[0]}-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"{sys.argv[0]}-{rank}") for rank in (0, 1)):
        time.sleep(0.01)
"""
ENDS = {  # code of ranks 0 and 1, and the resulting exit code
    "well": (["pass", "pass"], 0),
    "stopped": ([STOP, STOP], 143),
    "stopped but for one": ([STOP, "meet(); sys.exit(2)"], 200),
    "killed": (["time.sleep(60)", "os.kill(os.getpid(), 9)"], 200),
}


def launch(folder: Path, name: str) -> subprocess.Popen[str]:
    script = folder / f"{name}.py"
    script.write_text(f"import os, signal, sys, time\n{MEET}\nexec({ENDS[name][0]}[int(os.environ['RANK'])])\n")
    command = [
        sys.executable,
        "-m",
        "assay.integrations.slurm.train_node",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "SLURM_NODEID": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_exit_code_distinguishes_stopped_from_failed(tmp_path: Path) -> None:
    started = {name: launch(tmp_path, name) for name in ENDS}
    output = {name: process.communicate(timeout=100)[1] for name, process in started.items()}
    assert {name: process.returncode for name, process in started.items()} == {n: code for n, (_, code) in ENDS.items()}
    assert "Signal 9 (SIGKILL)" in output["killed"] and "rank      : 1" in output["killed"]
    assert "Traceback" not in output["killed"]
