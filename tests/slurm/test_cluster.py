"""`assay slurm` on a real Slurm: whatever takes a job off its nodes, it ends with the weights of one left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from one_machine import Slurm, slurm_on_one_machine, wait_until

from assay.runs.rollouts import read_rollouts
from tests.test_seed_workflows import Workflow

pytestmark = pytest.mark.slurm

PROCESSES = 2  # on one node, or one on each of two: the same run to the bit
STEPS = 12
CONFIG = """
model = "preset:nano"
device = "cpu"
task = {{name = "abacus", args = {{train_size = 24, eval_size = 10}}}}
sampling.max_new_tokens = 8
train = {{steps = {steps}, prompts = 4, samples = 4}}
optim.lr = 1e-3
save.every = 2
eval = {{examples = 4, final_examples = 5}}
reward = {{workers = 0, function = "{folder}/reward.py:reward"}}
"""
# Random models solve nothing, so letters are rewarded; and slowly while a run is to be interrupted: five a second.
REWARD = """
import os, time

def reward(completion, answer):
    if os.path.exists(os.path.join(os.path.dirname(__file__), "hold-" + os.environ["SLURM_JOB_NAME"])):
        time.sleep(0.2)
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


def submit(slurm: Slurm, work: Path, name: str, *words: object, nodes: int = 1) -> int:
    command = [sys.executable, "-m", "assay", "slurm", "small.toml", "--name", name, "--gpus-per-node", 0]
    command += ["--nodes", nodes, "--procs-per-node", PROCESSES // nodes, "--cpus-per-task", PROCESSES // nodes]
    return int(slurm(*command, "--time", 10, "--grace", 60, *words, "--submit", cwd=work).split()[-1])


@contextmanager
def held(slurm: Slurm, work: Path, name: str, *words: object, nodes: int = 1) -> Iterator[tuple[int, str]]:
    """The job and the run of this name, on its way, and slow for as long as the block lasts."""
    hold = work / f"hold-{name}"
    hold.touch()
    job = submit(slurm, work, name, *words, nodes=nodes)
    wait_until(lambda: saved(work, f"{name}-{job}") >= 2, 120, f"{name} is on its way")
    yield job, f"{name}-{job}"
    assert not (work / "runs" / f"{name}-{job}" / "summary.json").exists(), "the run ended before it was interrupted"
    hold.unlink()


def saved(work: Path, run: str) -> int:
    """The step of the newest checkpoint."""
    steps = sorted((work / "runs" / run / "checkpoints").glob("step-*/complete.json"))
    return int(steps[-1].parent.name.removeprefix("step-")) if steps else 0


def log(work: Path, job: str, node: int = 0) -> str:
    return (work / "runs" / "slurm" / f"{job}-node{node}.log").read_text()


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


@pytest.mark.parametrize(("how", "nodes"), [("requeue", 1), ("warning", 2)])
def test_an_interrupted_job_ends_with_the_weights_of_one_left_alone(
    slurm: Slurm, work: Path, untouched: bytes, how: str, nodes: int
) -> None:
    name = f"{how}-{nodes}"
    with held(slurm, work, name, nodes=nodes) as (job, run):
        INTERRUPTIONS[how](slurm, job)
        wait_until(lambda: slurm.job(job)["Restarts"] == "1", 90, f"{run} is in the queue again")
    if how != "requeue":  # where it may be killed before it has saved
        assert "to resume from there: assay train --resume" in log(work, run)
    assert weights(slurm, work, run, job) == untouched
    assert slurm.job(job)["Restarts"] == "1"
    starts = json.loads((work / "runs" / run / "environment.json").read_text())
    assert len(starts["resumed"]) == 1
    assert sorted(path.name for path in (work / "runs").glob(f"{name}*")) == [run]  # it went on with its own run
    logs = sorted(path.name for path in (work / "runs" / "slurm").glob(f"{run}*"))
    assert logs == [*(f"{run}-node{node}.log" for node in range(nodes)), f"{run}.log"]


def test_a_rank_that_dies_takes_the_job_down_and_the_run_can_go_on(slurm: Slurm, work: Path, untouched: bytes) -> None:
    with held(slurm, work, "killed", nodes=2) as (job, run):
        os.kill(process(job, rank=1), signal.SIGKILL)
        wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", 60, "the job fails")
    assert slurm.job(job)["Restarts"] == "0"
    assert slurm.job(job)["ExitCode"] in ("200:0", "137:0")  # 137: the other node was slow to end, and was killed
    said = log(work, run, node=1)
    assert "rank      : 1" in said and "Signal 9 (SIGKILL)" in said
    again = int(slurm("sbatch", "--parsable", work / "killed.sbatch", run))
    assert weights(slurm, work, run, again) == untouched


def process(job: int, rank: int) -> int:
    """The id of a rank's process, which torchrun has started in this job."""
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"RANK={rank}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                return int(path.parent.name)
    raise AssertionError(f"job {job} has no rank {rank}")


def test_an_error_does_not_go_round_in_circles(slurm: Slurm, work: Path) -> None:
    job = submit(slurm, work, "wrong", "--model", "no/such/model")
    wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", 120, "the job fails")
    assert (slurm.job(job)["Restarts"], slurm.job(job)["ExitCode"]) == ("0", "200:0")
    errors = [line for line in log(work, f"wrong-{job}").splitlines() if line.startswith("assay: ")]
    assert len(errors) == 1 and "no/such/model" in errors[0]  # one rank says it


# Jobs with an engine node. Prompts are not repeated: each has to be trained once.
ENGINE_STEPS, PROMPTS = 24, 4
ENGINES = f"--engines 1 --engine assay --train.steps {ENGINE_STEPS} --task.args.train_size {ENGINE_STEPS * PROMPTS}"
ON_POLICY = f"{ENGINES} --servers-per-node 2 --procs-per-node 1".split()
ASYNC = [*ON_POLICY, *["--source", "async", "--source.max_staleness", "2"]]


def end_of(slurm: Slurm, job: int) -> dict[str, str]:
    """The job after its end, when none of its processes is left."""
    wait_until(lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 300, f"{job} ends")
    wait_until(lambda: not processes(job), 30, f"no process of {job} is left")
    return slurm.job(job)


def processes(job: int, *words: str) -> list[int]:
    """Processes of a job that run Python with these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            command = (path.parent / "cmdline").read_bytes().decode(errors="replace").split("\0")
            of_job = f"SLURM_JOB_ID={job}".encode() in path.read_bytes().split(b"\0")
            if of_job and command[1 : 1 + len(words)] == list(words):
                found.append(int(path.parent.name))
    return found


def logs_of(work: Path, run: str) -> str:
    return "\n".join(f"== {path}\n{path.read_text()}" for path in sorted((work / "runs" / "slurm").glob(f"{run}*.log")))


def assert_trained_once(work: Path, run: str) -> None:
    """All groups of all steps, of an asynchronous run or not."""
    path = work / "runs" / run
    trained = Counter(group.prompt.id for step in range(1, ENGINE_STEPS + 1) for group in read_rollouts(path, step))
    assert len(trained) == trained.total() == ENGINE_STEPS * PROMPTS
    assert (path / "summary.json").exists() and saved(work, run) == ENGINE_STEPS


def test_a_job_with_an_engine_node_trains_to_its_end(slurm: Slurm, work: Path) -> None:
    name = "engines"
    job = submit(slurm, work, name, *ON_POLICY)
    ended, run = end_of(slurm, job), f"{name}-{job}"
    assert (ended["JobState"], ended["Restarts"], ended["NumNodes"]) == ("COMPLETED", "0", "2"), logs_of(work, run)
    assert_trained_once(work, run)
    names = sorted(path.name.removeprefix(run) for path in (work / "runs" / "slurm").glob(f"{run}*"))
    assert names == ["-engine0-server0.log", "-engine0-server1.log", "-engine0.log", "-node0.log", ".log"]
    assert "the servers have ended" in (work / "runs" / "slurm" / f"{run}-engine0.log").read_text()


@pytest.mark.parametrize("how", ["requeue", "preemption"])
def test_an_interrupted_job_with_an_engine_node_trains_every_group_once(slurm: Slurm, work: Path, how: str) -> None:
    name = f"engines-{how}"
    with held(slurm, work, name, *ASYNC) as (job, run):
        INTERRUPTIONS[how](slurm, job)
        wait_until(lambda: slurm.job(job)["Restarts"] == "1", 90, f"{run} is in the queue again")
    if how != "requeue":  # where it may be killed before it has saved
        assert "to resume from there: assay train --resume" in log(work, run), logs_of(work, run)
    ended = end_of(slurm, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), logs_of(work, run)
    assert_trained_once(work, run)


def test_the_failure_of_all_engine_nodes_ends_the_job_and_the_run_can_go_on(slurm: Slurm, work: Path) -> None:
    with held(slurm, work, "no-servers", *ASYNC, "--server.recover_s", 10) as (job, run):
        (node,) = processes(job, "-m", "assay.integrations.slurm", "engine")
        os.kill(node, signal.SIGKILL)
        ended = end_of(slurm, job)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "200:0"), logs_of(work, run)
    assert "is not reachable" in log(work, run)
    assert "all engine nodes have ended: see " in (work / "runs" / "slurm" / f"{run}.log").read_text()
    again = int(slurm("sbatch", "--parsable", work / "no-servers.sbatch", run))
    assert end_of(slurm, again)["JobState"] == "COMPLETED"
    assert_trained_once(work, run)


def test_a_cancelled_job_with_an_engine_node_leaves_no_process(slurm: Slurm, work: Path) -> None:
    with held(slurm, work, "engines-cancelled", *ASYNC) as (job, _):
        slurm("scancel", job)
        ended = end_of(slurm, job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")


def test_the_slurm_command_of_dr_grpo_trains_the_recipe(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow = Workflow(tmp_path, monkeypatch, capsys, "dr_grpo")
    workflow.model("Qwen/Qwen2.5-3B-Instruct")
    prepare, command = (workflow.line(text) for text in ("assay data prepare", "assay slurm"))
    command = re.sub(r"--gpus-per-node \d+", f"--gpus-per-node 0 --procs-per-node {PROCESSES}", command)
    for line in (prepare, f"{command} --cpus-per-task {PROCESSES} --time 10 --submit"):
        printed = slurm("bash", "-c", line.replace("assay", f"{sys.executable} -m assay", 1), cwd=tmp_path)
    job = int(printed.split()[-1])
    assert end_of(slurm, job)["JobState"] == "COMPLETED", logs_of(tmp_path, f"dr_grpo-{job}")
    assert len(workflow.rollouts(f"dr_grpo-{job}", 1, 2)) == 2 * 4 * 4
