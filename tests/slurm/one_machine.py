"""A real Slurm of two nodes on this machine, from a folder of its own: own ports, own munge, nothing left behind."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# cred_expire bounds how long a requeued job waits before it starts again (120 s by default).
CONF = """
ClusterName=assay
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=3
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=10
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")


def missing() -> list[str]:
    return [name for name in NEEDED if not shutil.which(name, path=search_path())]


def search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin"


class Slurm:
    """Slurm's commands, as they see this cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()}

    def __call__(self, *words: object, cwd: Path | None = None) -> str:
        command = [str(word) for word in words]
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        text = self("scontrol", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s until {what}"
        time.sleep(0.3)


@contextmanager
def slurm_on_one_machine(folder: Path) -> Iterator[Slurm]:
    """Everything in `folder`, whose path has to be short: there is a socket in it."""
    for name in ("state", "munge", "spool-one", "spool-two"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, user=user, ports=free_ports(3)))
    slurm = Slurm(folder)
    files = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    commands = {
        "munged": ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *files],
        "slurmctld": ["slurmctld", "-D"],
        **{f"slurmd-{node}": ["slurmd", "-D", "-N", node] for node in ("one", "two")},
    }
    daemons = []
    # It sweeps when its input ends: when we are done, and also when we are killed.
    guard_command = [sys.executable, __file__, slurm.environment["SLURM_CONF"]]
    guard = subprocess.Popen(guard_command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        for name, command in commands.items():
            with (folder / f"{name}.log").open("w") as log:
                daemons.append(subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log))
            if name == "munged":
                wait_until((folder / "munge" / "socket").exists, 20, "munged listens")
        wait_until(lambda: idle(slurm) == 2, 60, f"both nodes are up (logs in {folder})")
        yield slurm
    finally:
        guard.communicate()
        for daemon in daemons:
            daemon.wait()


def idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-p", "usual", "-t", "idle", "-o", "%D"], env=slurm.environment, capture_output=True, text=True
    )
    return int(done.stdout.strip() or 0)


def sweep(conf: str) -> None:
    """Kill whatever runs in this cluster: its daemons and all below them carry the path of its configuration."""
    while found := [path for path in Path("/proc").glob("[0-9]*/environ") if is_of(conf, path)]:
        for path in found:
            with suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.1)


def is_of(conf: str, environ: Path) -> bool:
    try:
        return f"SLURM_CONF={conf}\0".encode() in environ.read_bytes()
    except OSError:
        return False  # gone already, or somebody else's


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    sys.stdin.read()
    sweep(sys.argv[1])
