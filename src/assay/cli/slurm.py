"""Write a Slurm batch script that trains on one or several nodes, as described by a config file, and submit it."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from shlex import join, quote

from assay.checks.settings import SERVER_SECTIONS, check_placed_servers
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs.directory import as_name, check_name
from assay.runs.files import reported
from assay.types import UserError

SETTINGS = TrainConfig
SBATCH_OPTIONS = ("partition", "account", "time", "cpus_per_task", "mem")  # passed to sbatch unchanged
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED", re.IGNORECASE)
MEMORY = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
MAX_GRACE = 65535  # seconds: Slurm's limit
WARNING_TOLERANCE = 60  # seconds by which Slurm may send its signal too early
REQUEUE_MARGIN = 30  # seconds before the limit at which a run that has not saved yet is requeued anyway


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", help="TOML file, e.g. configs/demo.toml")
    add("--nodes", type=int, default=1, help="nodes that train [1]")
    add("--gpus-per-node", type=int, required=True, metavar="N", help="GPUs per node, with one process each; 0: none")
    add("--procs-per-node", type=int, metavar="N", help="processes per node without GPUs [1]")
    add("--engines", type=int, metavar="N", help="N more nodes that only generate, with engine servers [0]")
    add("--servers-per-node", type=int, metavar="N", help="servers per engine node [one per GPU; 1 without GPUs]")
    add("--cpus-per-task", type=int, metavar="N", help="cores per node, for all its processes [the cluster's default]")
    add("--mem", help="memory per node, e.g. 200G; 0: all [the cluster's default]")
    add("--time", help="time limit, e.g. 4:00:00 or 2-12 (days-hours) [the partition's]")
    add("--partition", help="partition [the cluster's default]")
    add("--account", help="account to charge [your default]")
    add(
        "--grace",
        type=int,
        default=120,
        metavar="S",
        help="seconds before the time limit at which the run saves, at least 60 [120]",
    )
    add(
        "--before",
        action="append",
        default=[],
        metavar="COMMAND",
        help="run this first, e.g. 'module load cuda'; may be repeated",
    )
    add("--output", type=Path, metavar="FILE", help="script file [NAME.sbatch]")
    add("--submit", action="store_true", help="submit the script with sbatch")


def run(args: argparse.Namespace) -> int:
    check(args)
    cfg = load_settings(TrainConfig, args.config, args.overrides)
    check_engines(args, cfg)
    name = cfg.name or as_name(Path(args.config).stem)
    check_name(name)
    text = script(args, cfg, name)
    path = args.output or Path(f"{name}.sbatch")
    write(path, text, Path(cfg.runs_dir) / "slurm")
    print(f"wrote {path}; the logs will be in {Path(cfg.runs_dir) / 'slurm'}")
    if args.engines and args.engines * servers_per_node(args) == 1:
        print("note: there is one engine server, and its failure can end the job; several servers replace each other")
    if args.submit:
        print(submit(path))
    else:
        print(f"submit it with: sbatch {quote(str(path))}")
    return 0


def check(args: argparse.Namespace) -> None:
    """Report what sbatch would reject or misinterpret, before anything is written."""
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: a job needs at least one node")
    if args.gpus_per_node < 0:
        raise UserError(f"--gpus-per-node {args.gpus_per_node}: give the GPUs of a node, or 0 to train on CPUs")
    if args.gpus_per_node and args.procs_per_node not in (None, args.gpus_per_node):
        raise UserError("--procs-per-node is for nodes without GPUs: there is one process per GPU")
    for option in ("procs_per_node", "cpus_per_task", "engines", "servers_per_node"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: give at least 1")
    if args.grace < 60:
        raise UserError(f"--grace {args.grace}: Slurm checks time limits about once per minute, so give at least 60")
    if args.grace > MAX_GRACE:
        raise UserError(f"--grace {args.grace}: Slurm allows at most {MAX_GRACE} seconds")
    if args.mem is not None and not MEMORY.fullmatch(args.mem):
        raise UserError(f"--mem {args.mem}: give megabytes, or an integer with K, M, G or T, e.g. 200G")
    if args.time is not None and not TIME.fullmatch(args.time):
        raise UserError(f"--time {args.time}: give minutes, hours:minutes:seconds or days-hours, e.g. 4:00:00")
    if args.time and seconds(args.time) <= args.grace + WARNING_TOLERANCE:
        raise UserError(
            f"--time {args.time}: the run would have to save as soon as it starts; "
            f"give more than {args.grace + WARNING_TOLERANCE} seconds, or lower --grace"
        )
    for word in (args.config, *(getattr(args, option) or "" for option in ("mem", "partition", "account"))):
        if "\n" in word:
            raise UserError(f"{word!r} contains a line break, which is not allowed in batch scripts")
    if args.submit and not shutil.which("sbatch"):
        raise UserError("sbatch is not installed: leave out --submit, or run this where Slurm is installed")


def check_engines(args: argparse.Namespace, cfg: TrainConfig) -> None:
    """Report options and settings that do not fit nodes that only generate."""
    if args.engines is None:
        if args.servers_per_node is not None:
            raise UserError("--servers-per-node is for nodes that only generate: give their number with --engines")
        return
    check_placed_servers(cfg, "--engines")
    section = SERVER_SECTIONS[cfg.engine.name]
    if getattr(cfg, section).transport not in ("auto", "folder"):
        raise UserError(f"weights reach engine nodes through a folder: set {section}.transport to auto or folder")
    gpus, servers = args.gpus_per_node, servers_per_node(args)
    if gpus and gpus % servers:
        raise UserError(f"--servers-per-node {servers}: the {gpus} GPUs of a node cannot be divided equally")
    if gpus and cfg.engine.name == "assay" and servers != gpus:
        raise UserError("engine assay uses one GPU per server: leave out --servers-per-node")


def servers_per_node(args: argparse.Namespace) -> int:
    return args.servers_per_node or args.gpus_per_node or 1


def seconds(limit: str) -> float:
    """Parse minutes[:seconds], hours:minutes:seconds, or days-hours[:minutes[:seconds]]; 0: no limit."""
    if limit.upper() == "UNLIMITED":
        return math.inf
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    first = 3600 if days or len(parts) == 3 else 60
    return 86400 * int(days or 0) + sum(part * first / 60**index for index, part in enumerate(parts)) or math.inf


def script(args: argparse.Namespace, cfg: TrainConfig, name: str) -> str:
    """Options of sbatch, the user's commands, the values of this run, and the common part (slurm_job.sh), which runs
    `assay.integrations.slurm` on all nodes: on those that train, and on those that only generate.
    """
    logs = f"{cfg.runs_dir}/slurm/".replace("%", "%%")  # Slurm replaces %x and others by names
    settings = [word for word in args.settings if word.partition("=")[0] != "--name"]
    options = {
        "job-name": name,
        "nodes": args.nodes + (args.engines or 0),
        "ntasks-per-node": 1,
        **({"gpus-per-node": args.gpus_per_node} if args.gpus_per_node else {}),
        **{key.replace("_", "-"): value for key in SBATCH_OPTIONS if (value := getattr(args, key)) is not None},
        "chdir": Path.cwd(),
        "output": f"{logs}%x-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{args.grace}",
    }
    values = {
        "name": quote(name),
        "config": quote(args.config),
        "runs": quote(cfg.runs_dir),
        "python": quote(sys.executable),
        "processes": args.gpus_per_node or args.procs_per_node or 1,
        "node_log": f'{quote(logs)}"$SLURM_JOB_NAME-$SLURM_JOB_ID-node%n.log"',
        "engines": args.engines or 0,
        "patience": args.grace - REQUEUE_MARGIN,
        "settings": f"({join(settings)})",
    }
    if args.engines:
        values["engine_log"] = f'{quote(logs)}"$SLURM_JOB_NAME-$SLURM_JOB_ID-engine%n.log"'
        values |= {"servers": servers_per_node(args), "gpus": args.gpus_per_node}
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{key}={quote(str(value))}" for key, value in options.items()),
            "#SBATCH --requeue",
            "",
            "# Without traps these signals would end this shell. USR1 announces the time limit; the run handles TERM.",
            "warned=",
            "trap 'warned=yes' USR1",
            "trap : TERM",
            *args.before,
            *(f"{key}={value}" for key, value in values.items()),
            files("assay.integrations").joinpath("slurm_job.sh").read_text(encoding="utf-8"),
        ]
    )


def write(path: Path, text: str, logs: Path) -> None:
    """Write the script and create the folder of its logs: Slurm does not, and the job would fail without a message."""
    with reported(path, "choose another --output"):
        if path.exists() and path.read_bytes() != text.encode():
            raise UserError(f"{path} exists and is a different script: choose another --output, or delete it")
    with reported(logs, "choose another runs_dir"):
        logs.mkdir(parents=True, exist_ok=True)
    with reported(path, "choose another --output"):
        path.write_text(text, encoding="utf-8")


def submit(path: Path) -> str:
    done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"sbatch rejected {path}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
