"""`assay slurm` on a real Slurm: whatever takes a job off its nodes, it ends with the weights of one left alone."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from one_machine import Slurm, slurm_on_one_machine, wait_until

pytestmark = pytest.mark.slurm

PROCESSES = 1  # a node
STEPS = 100
CONFIG = """
model = "preset:nano"
device = "cpu"
[task]
name = "abacus"
args = {{train_size = 24, eval_size = 10}}
[sampling]
max_new_tokens = 8
[train]
steps = {steps}
prompts = 4
samples = 4
[optim]
lr = 1e-3
[save]
every = 4
[eval]
examples = 4
final_examples = 5
[reward]
workers = 0
function = "{folder}/reward.py:reward"
"""
# Random models solve nothing, so letters are rewarded; and slowly, to have the time to interrupt a run.
REWARD = """
import time

def reward(completion, answer):
    time.sleep(0.01)
    return {"reward": sum(map(ord, completion)) % 4 / 3, "parsed": completion}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="assay-") as folder, slurm_on_one_machine(Path(folder)) as cluster:
        cluster.environment["OMP_NUM_THREADS"] = "1"
        yield cluster


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("it's 100% work")
    (folder / "reward.py").write_text(REWARD)
    (folder / "small.toml").write_text(CONFIG.format(folder=folder, steps=STEPS))
    return folder


def submit(slurm: Slurm, work: Path, name: str, *words: object, patience: int | None = None) -> int:
    command = [sys.executable, "-m", "assay", "slurm", "small.toml", "--name", name, "--gpus-per-node", 0]
    command += ["--procs-per-node", PROCESSES, "--cpus-per-task", PROCESSES, "--time", 10, "--grace", 60, *words]
    if patience is None:
        return int(slurm(*command, "--submit", cwd=work).split()[-1])
    slurm(*command, cwd=work)
    file = work / f"{name}.sbatch"
    file.write_text(file.read_text().replace("patience=30", f"patience={patience}"))
    return int(slurm("sbatch", "--parsable", file))


def saved(work: Path, run: str) -> int:
    """The step of the newest checkpoint."""
    steps = sorted((work / "runs" / run / "checkpoints").glob("step-*/complete.json"))
    return int(steps[-1].parent.name.removeprefix("step-")) if steps else 0


def weights(slurm: Slurm, work: Path, run: str, job: int) -> bytes:
    """Of the finished run."""
    wait_until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 300, f"{run} ends")
    logs = "\n".join(path.read_text() for path in sorted((work / "runs" / "slurm").glob(f"{run}*.log")))
    assert slurm.job(job)["JobState"] == "COMPLETED", logs
    assert saved(work, run) == STEPS
    return (work / "runs" / run / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def untouched(slurm: Slurm, work: Path) -> bytes:
    job = submit(slurm, work, "untouched")
    found = weights(slurm, work, f"untouched-{job}", job)
    assert slurm.job(job)["Restarts"] == "0"
    return found


URGENT = "sbatch --partition=urgent --nodes=2 --exclusive --chdir=/ --output=/dev/null --wrap"
INTERRUPTIONS = {
    "requeue": lambda slurm, job: slurm("scontrol", "requeue", job),
    "warning": lambda slurm, job: slurm("scancel", "--signal=USR1", "--batch", job),  # as Slurm does before the limit
    "preemption": lambda slurm, job: slurm(*URGENT.split(), "sleep 2"),
}


@pytest.mark.parametrize("how", INTERRUPTIONS)
def test_an_interrupted_job_ends_with_the_weights_of_one_left_alone(
    slurm: Slurm, work: Path, untouched: bytes, how: str
) -> None:
    job = submit(slurm, work, how, patience=2 if how == "warning" else None)
    run = f"{how}-{job}"
    wait_until(lambda: saved(work, run) >= 8, 120, f"{run} is on its way")
    INTERRUPTIONS[how](slurm, job)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", 90, f"{run} is in the queue again")
    assert not (work / "runs" / run / "summary.json").exists(), "the run ended before it was interrupted"
    assert weights(slurm, work, run, job) == untouched
    assert slurm.job(job)["Restarts"] == "1"
    starts = json.loads((work / "runs" / run / "environment.json").read_text())
    assert len(starts["resumed"]) == 1
    assert sorted(path.name for path in (work / "runs").glob(f"{how}*")) == [run]  # it went on with its own run
    logs = sorted(path.name for path in (work / "runs" / "slurm").glob(f"{run}*"))
    assert logs == [f"{run}-node0.log", f"{run}.log"]


def test_an_error_does_not_go_round_in_circles(slurm: Slurm, work: Path) -> None:
    job = submit(slurm, work, "wrong", "--model", "no/such/model")
    wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", 120, "the job fails")
    assert (slurm.job(job)["Restarts"], slurm.job(job)["ExitCode"]) == ("0", "200:0")
    assert "no/such/model" in (work / "runs" / "slurm" / f"wrong-{job}-node0.log").read_text()


def test_a_cancelled_job_stays_cancelled(slurm: Slurm, work: Path) -> None:
    job = submit(slurm, work, "cancelled")
    wait_until(lambda: saved(work, f"cancelled-{job}") >= 4, 120, "the run is on its way")
    slurm("scancel", job)
    wait_until(lambda: str(job) not in slurm("squeue", "--noheader", "--format=%i").split(), 60, "the job is gone")
    assert (slurm.job(job)["JobState"], slurm.job(job)["Restarts"]) == ("CANCELLED", "0")
