"""`assay slurm`: the script that it writes, run by a real shell with substitutes for Slurm's commands.

On a real Slurm: tests/slurm.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from assay.cli.main import main
from assay.cli.slurm import seconds

ODD = 'it\'s 100% "odd" $HOME `ls` #1'
CONFIG = 'model = "preset:nano"\n[task]\nname = "abacus"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*words: object, config: str = "tiny.toml", gpus: int = 0) -> int:
    return main(["slurm", config, "--gpus-per-node", str(gpus), *map(str, words)])


def sbatch_options(file: Path) -> dict[str, str]:
    """What sbatch reads: its lines end at the first command."""
    result = {}
    for line in file.read_text().splitlines()[1:]:
        if not line.startswith("#SBATCH "):
            break
        (word,) = shlex.split(line.removeprefix("#SBATCH "))
        key, _, value = word.removeprefix("--").partition("=")
        result[key] = value
    return result


def test_options_become_sbatch_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(
        "--nodes 2 --partition long --account us --time 1-12:30 --cpus-per-task 64 --mem 200G --grace 300"
    )
    assert write(*words, "--before", "module load cuda", "--before", "ulimit -n 4096", gpus=8) == 0
    assert "sbatch tiny.sbatch" in capsys.readouterr().out
    assert sbatch_options(folder / "tiny.sbatch") == {
        **{"job-name": "tiny", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "partition": "long"},
        **{"account": "us", "time": "1-12:30", "cpus-per-task": "64", "mem": "200G", "chdir": str(folder)},
        **{"output": "runs/slurm/%x-%j.log", "open-mode": "append", "signal": "B:USR1@300", "requeue": ""},
    }
    text = (folder / "tiny.sbatch").read_text()
    assert text.index("\nmodule load cuda\nulimit -n 4096\n") < text.index("srun ")
    assert subprocess.run(["bash", "-n", "tiny.sbatch"], capture_output=True, text=True).stderr == ""
    assert (folder / "runs" / "slurm").is_dir()  # Slurm would not make it


def test_a_script_is_not_overwritten_by_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write() == write() == 0  # the same again is no other
    before = (folder / "tiny.sbatch").read_text()
    assert write("--nodes", 2) == 2
    assert "choose another --output" in capsys.readouterr().err and (folder / "tiny.sbatch").read_text() == before
    assert write("--nodes", 2, "--output", "other.sbatch") == 0


ONE = "--engines 1 --engine"
BAD = [
    ("--nodes 0", "--nodes 0"),
    ("--gpus-per-node -1", "--gpus-per-node -1"),
    ("--procs-per-node 0", "--procs-per-node 0"),
    ("--gpus-per-node 2 --procs-per-node 4", "one process per GPU"),
    ("--grace 10", "--grace 10"),
    ("--grace 86400", "at most 65535 seconds"),
    ("--mem lots", "--mem lots"),
    ("--time '2 hours'", "--time 2 hours"),
    ("--time 3", "more than 180 seconds"),
    ("--partition 'a\n#SBATCH --uid=0'", "line break"),
    ("--train.stpes 3", "did you mean 'train.steps'"),
    ("--name ../up", "cannot name a run"),
    ("--output no/where.sbatch", "cannot write no/where.sbatch"),
    ("--submit", "sbatch is not installed"),
    ("--engines 0 --engine assay", "--engines 0"),
    ("--engines 1", "engine auto has no servers"),
    (f"{ONE} my.py:make", "engine my.py:make has no"),
    (f"{ONE} openai", "engine.name"),
    (f"{ONE} assay --server.urls '[\"http://n1:8000\"]'", "server.urls names running ones"),
    (f"{ONE} vllm --vllm.servers 2", "vllm.servers is for servers on the trainer's node"),
    (f"{ONE} vllm --vllm.transport ipc", "vllm.transport"),
    (f"{ONE} sglang --engine.sleep_while_training", "sleep_while_training has no use"),
    (f"{ONE} assay --servers-per-node 0", "--servers-per-node 0"),
    ("--servers-per-node 2", "give their number with --engines"),
    (f"{ONE} vllm --gpus-per-node 8 --servers-per-node 3", "8 GPUs of a node cannot be divided"),
    (f"{ONE} assay --gpus-per-node 8 --servers-per-node 4", "one GPU per server"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_one_line_and_writes_no_script(
    folder: Path, stderr_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    result = stderr_of(write(*shlex.split(words)))
    assert message in result and result.startswith("assay: ") and result.count("\n") == 1
    assert not list(folder.rglob("*.sbatch"))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        *(("90", 5400), ("90:30", 5430), ("1:30:05", 5405), ("2-3", 183600), ("1-0:30", 88200), ("1-1:1:1", 90061)),
        *(("0", math.inf), ("unlimited", math.inf)),
    ],
)
def test_time_limits_are_parsed_as_by_sbatch(limit: str, expected: float) -> None:
    assert seconds(limit) == expected


def test_no_config_is_one_line(folder: Path, stderr_of: Callable[..., str]) -> None:
    assert write(config="none.toml") == 2
    assert main(["slurm", "tiny.toml"]) == 2
    result = stderr_of(main(["slurm", "--gpus-per-node", "1"])).splitlines()
    assert len(result) == 3 and "no config file at none.toml" in result[0] and "--gpus-per-node" in result[1]


# From here on the script is run. srun runs what it is given in a session of its own, as Slurm does with a step.
STAND_INS = {
    "srun": """step=train; [[ "$*" == *"assay.integrations.slurm engine"* ]] && step=engine
        while [[ $1 == --* ]]; do echo "$1" >>srun-$step.txt; shift; done
        SLURM_NODEID=0 setsid "$@" <&0 & echo $! >session-$step; wait $!""",
    "scancel": """until [ -e ready ]; do /bin/sleep 0.05; done
        echo "$@" >>scancel.txt; for file in session-*; do kill -TERM -- "-$(cat "$file")"; done""",
    "sleep": "exec /bin/sleep 0.05",
    "squeue": "echo ${STATE:-RUNNING}",
    "scontrol": """case "$1 $2" in
        'show hostnames') echo n7; echo n8;;
        'show node') echo "NodeName=$3"; echo "   NodeAddr=$3.cluster NodeHostName=$3";;
        *) echo "$@" >>scontrol.txt;; esac""",
}
# Stands for an engine node, or for torchrun and the training below it: one that catches SIGTERM, and one that does not.
PYTHON = """#!{python} -S
import json, os, signal, sys, time
if "assay.integrations.slurm engine" in " ".join(sys.argv):
    folder = os.environ["ASSAY_ENGINE_NODES"]
    ends = os.environ.get("ENGINES_END", "with their input") == "with their input" and sys.stdin.read()
    seen = {{"command": sys.argv[1:], "folder": folder, "mode": os.stat(folder).st_mode & 0o777}}
    seen["training stopped first"] = os.path.exists("stopped")
    open("engine.json", "w").write(json.dumps(seen))
    sys.exit(0)
open("command.json", "w").write(json.dumps(sys.argv[1:]))
def stop(*_):
    open("stopped", "w").close()
    sys.exit(143)
if os.environ["ENDS"] == "when told":
    signal.signal(signal.SIGTERM, stop)
if os.environ["ENDS"] in ("when told", "never"):
    open("ready", "w").close()
    time.sleep(60)
while os.environ["ENDS"] == "after the engine nodes" :
    time.sleep(0.05)
    if "engine nodes have ended" in open("log").read():
        sys.exit(200)
sys.exit(int(os.environ["ENDS"]))
"""


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = folder / "tools"
    tools.mkdir()
    texts = {name: f"#!/bin/bash\n{text}\n" for name, text in STAND_INS.items()}
    for name, text in {**texts, "python": PYTHON.format(python=sys.executable)}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for key, value in {"ID": "12003", "NAME": "tiny", "NODELIST": "n[7-8]", "NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{key}", value)
    return folder


def run_script(folder: Path, ends: str, *words: str, warn: bool = False, state: str = "RUNNING") -> int:
    environment = {**os.environ, "ENDS": ends, "STATE": state}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(["bash", "tiny.sbatch", *words], env=environment, stdout=log, stderr=log)
    if warn:
        until((folder / "ready").exists, 30)
        job.send_signal(signal.SIGUSR1)
    return job.wait(30)


def command(folder: Path) -> list[str]:
    return json.loads((folder / "command.json").read_text())


def test_arguments_of_torchrun(cluster: Path) -> None:
    assert write("--nodes", 2, "--procs-per-node", 3, "--train.steps", 7, "--prompt.system", ODD) == 0
    assert run_script(cluster, "0") == 0
    assert command(cluster) == [
        *shlex.split(
            "-m assay.integrations.slurm train --nnodes 2 --nproc-per-node 3 "
            "--master-addr n7.cluster --master-port 20003"
        ),
        *shlex.split("-m assay train tiny.toml --name tiny-12003 --train.steps=7"),
        f"--prompt.system={ODD}",
    ]
    given = (cluster / "srun-train.txt").read_text().splitlines()
    assert {"--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--export=ALL"} <= set(given)
    assert "--output=runs/slurm/tiny-12003-node%n.log" in given


def test_special_characters_in_paths_and_settings_are_preserved(cluster: Path) -> None:
    (cluster / ODD).mkdir()
    (cluster / "tiny.toml").rename(cluster / ODD / "tiny.toml")
    assert write("--runs_dir", ODD, config=f"{ODD}/tiny.toml") == 0
    assert sbatch_options(cluster / "tiny.sbatch")["output"] == ODD.replace("%", "%%") + "/slurm/%x-%j.log"
    assert run_script(cluster, "0") == 0
    assert command(cluster)[-4:] == [f"{ODD}/tiny.toml", "--name", "tiny-12003", f"--runs_dir={ODD}"]
    (cluster / ODD / "tiny-12003").mkdir()
    (cluster / ODD / "tiny-12003" / "config.toml").touch()
    assert run_script(cluster, "0") == 0
    assert command(cluster)[-4:] == ["--resume", f"{ODD}/tiny-12003", "--trust", f"--runs_dir={ODD}"]


def test_an_existing_run_is_resumed(cluster: Path) -> None:
    assert write("--name", "mine", "--output", "tiny.sbatch") == 0
    for run, words in (("mine-12003", ()), ("earlier-9", ("earlier-9",))):
        assert run_script(cluster, "0", *words) == 0
        assert command(cluster)[-3:] == ["tiny.toml", "--name", run]
        (cluster / "runs" / run).mkdir(parents=True)
        (cluster / "runs" / run / "config.toml").touch()
        assert run_script(cluster, "0", *words) == 0
        trusted = [] if words else ["--trust"]  # a run of this very job
        assert command(cluster)[-3 - len(trusted) :] == ["train", "--resume", f"runs/{run}", *trusted]


def test_the_signal_is_repeated_until_the_run_has_started(cluster: Path) -> None:
    assert write("--before", "kill -USR1 $$; kill -TERM $$") == 0
    assert run_script(cluster, "when told") == 143
    assert (cluster / "scontrol.txt").read_text() == "requeue 12003\n"


def test_a_run_that_does_not_save_in_time_is_requeued(cluster: Path) -> None:
    assert write() == 0
    text = (cluster / "tiny.sbatch").read_text()
    assert "patience=90\n" in text
    (cluster / "tiny.sbatch").write_text(text.replace("patience=90\n", "patience=2\n"))
    assert run_script(cluster, "never", warn=True) == 143
    assert "not saved in time" in (cluster / "log").read_text()  # SIGTERM ended nothing that does not catch it
    assert (cluster / "scontrol.txt").read_text() == "requeue 12003\n"
    os.killpg(int((cluster / "session-train").read_text()), signal.SIGKILL)  # Slurm's own work


def test_only_a_run_that_saves_before_the_time_limit_is_requeued(cluster: Path) -> None:
    assert write() == 0
    assert not {"gpus-per-node", "partition", "account", "time", "cpus-per-task", "mem"} & set(
        sbatch_options(cluster / "tiny.sbatch")
    )  # left to the cluster
    assert run_script(cluster, "1") == 1  # failed
    assert run_script(cluster, "when told", warn=True, state="CANCELLED") == 143
    assert not (cluster / "scontrol.txt").exists()
    for file in ("ready", "scancel.txt"):
        (cluster / file).unlink()
    assert run_script(cluster, "when told", warn=True) == 143
    assert (cluster / "scancel.txt").read_text() == "--signal=TERM 12003\n"
    assert (cluster / "scontrol.txt").read_text() == "requeue 12003\n"


ENGINES = ["--engines", 1, "--engine", "assay"]


def engine_node(folder: Path) -> dict[str, Any]:
    """What the stand-in for an engine node has seen; it writes this when it ends."""
    until((folder / "engine.json").exists, 30)
    return json.loads((folder / "engine.json").read_text())


def test_engine_nodes_follow_the_nodes_that_train(cluster: Path) -> None:
    assert write(*ENGINES, "--servers-per-node", 2, "--runs_dir", ODD) == 0
    assert sbatch_options(cluster / "tiny.sbatch")["nodes"] == "2"
    assert run_script(cluster, "0") == 0
    words = shlex.split("-m assay.integrations.slurm engine --servers 2 --gpus 0 --logs")
    seen = engine_node(cluster)
    assert seen["command"] == [*words, f"{ODD}/slurm/tiny-12003", "n8.cluster"]
    assert seen["folder"] == f"{ODD}/slurm/tiny-12003-servers" and seen["mode"] == 0o700
    assert not (cluster / seen["folder"]).exists()
    assert command(cluster)[1:7] == shlex.split("assay.integrations.slurm train --nnodes 1 --nproc-per-node 1")
    given = {step: set((cluster / f"srun-{step}.txt").read_text().splitlines()) for step in ("train", "engine")}
    assert {"--relative=0", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=1"} <= given["train"]
    assert {"--relative=1", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=0"} <= given["engine"]
    assert f"--output={ODD.replace('%', '%%')}/slurm/tiny-12003-engine%n.log" in given["engine"]


def test_number_of_servers_and_nodes(
    folder: Path, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    words = ["--nodes", 2, "--engines", 3, "--engine", "vllm", "--output"]
    assert write(*words, "gpus.sbatch", gpus=8) == 0
    assert "note" not in stdout_of(write(*words, "pairs.sbatch", "--servers-per-node", 4, gpus=8))
    assert write(*ENGINES, "--output", "one.sbatch") == 0
    assert "there is one engine server, and its failure can end the job" in capsys.readouterr().out
    texts = [(folder / f"{name}.sbatch").read_text() for name in ("gpus", "pairs", "one")]
    assert ["servers=8\ngpus=8\n" in texts[0], "servers=4\ngpus=8\n" in texts[1]] == [True, True]
    assert "servers=1\ngpus=0\n" in texts[2] and sbatch_options(folder / "gpus.sbatch")["nodes"] == "5"


def test_servers_run_until_training_has_saved(cluster: Path) -> None:
    assert write(*ENGINES) == 0
    assert run_script(cluster, "when told", warn=True) == 143
    assert engine_node(cluster)["training stopped first"]
    assert (cluster / "scontrol.txt").read_text() == "requeue 12003\n"


def test_engine_nodes_end_with_a_failed_training(cluster: Path) -> None:
    assert write(*ENGINES) == 0
    assert run_script(cluster, "200") == 200
    assert engine_node(cluster)["command"] and not (cluster / "scontrol.txt").exists()


def test_engine_nodes_that_end_are_reported(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINES_END", "at once")
    assert write(*ENGINES) == 0
    assert run_script(cluster, "after the engine nodes") == 200
    assert "all engine nodes have ended: see runs/slurm/tiny-12003-engine*.log" in (cluster / "log").read_text()


def test_a_job_without_engine_nodes_ignores_those_of_another_job(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cluster / "other"
    other.mkdir()
    monkeypatch.setenv("ASSAY_ENGINE_NODES", str(other))
    assert write() == 0
    assert run_script(cluster, "0") == 0
    assert other.exists() and not (cluster / "session-engine").exists()


def test_the_output_of_sbatch_is_printed(
    cluster: Path, stdout_of: Callable[..., str], stderr_of: Callable[..., str]
) -> None:
    sbatch = cluster / "tools" / "sbatch"
    sbatch.write_text('#!/bin/bash\n[[ $1 == tiny.sbatch ]] && echo "Submitted batch job 5"\n')
    sbatch.chmod(stat.S_IRWXU)
    assert stdout_of(write("--submit")).splitlines()[-1] == "Submitted batch job 5"
    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2; exit 1\n")
    assert "sbatch rejected tiny.sbatch: invalid partition" in stderr_of(write("--submit"))
