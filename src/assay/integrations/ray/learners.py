"""`assay train` with cluster.kind = "ray": a driver asks Ray for resources, and starts and watches the training
processes ("learners"), which run the same command as with torchrun.

Each learner is a program in an actor. They train as one process group: if one dies, all are started again and resume
from the last checkpoint, `cluster.restarts` times. The output of the first learner is shown, and that of all is stored
in the folder `ray-logs` beside the runs. Engine servers belong to the first learner (see `servers`).

The driver is a process of its own, because Ray ends every process that loses the head of its cluster.

Not with `ray.train`: it runs the training function in a thread of its actors, where it would get no signals to save and
stop, and its failure policy knows only checkpoints of its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.config import CLUSTER_MEMBER, ClusterConfig, TrainConfig
from assay.integrations.ray.cluster import SIGNALS, connect, describe_resources, hosted_program, nodes, ray_package
from assay.system.isolation import die_with_parent
from assay.system.spawn import exit_reason, handlers_restored
from assay.types import UserError, excerpt, plural

POLL_S = 0.2
RETRY_S = 5.0  # between two attempts to start learners
DRIVER = "ASSAY_RAY_DRIVER"  # environment variable of the driver
ANSWER_S = 60.0  # time limit of an actor's answer
LAST_WORDS_S = 20.0  # for the other learners to end, and for Ray to report dead nodes, after one has ended
STOPPED = ("killed by SIGTERM", "killed by SIGINT")  # also the exit codes of learners that saved before they ended
ERROR = "exit code 2"  # of a learner that has reported what the user should change
DONE = "exit code 0"
DUMPS = re.compile(r"(?m)^.*\[state-dump\].*\n")  # of Ray, when a node is lost


@dataclass
class Commands:
    """What learners run: `first`, and after a restart `again`, if the run exists by then."""

    first: Sequence[str]
    again: Sequence[str]
    run: Path  # folder of the run


@dataclass
class Stop:
    """Signals to stop, which are passed to the learners."""

    requested: list[int] = field(default_factory=list)
    sent: int = 0

    def add(self, number: int, _: object) -> None:
        self.requested.append(number)

    @contextmanager
    def listening(self) -> Iterator[None]:
        with handlers_restored(SIGNALS):
            for number in SIGNALS:
                signal.signal(number, self.add)
            yield


def launch(cfg: TrainConfig, commands: Commands, say: Callable[[str], None]) -> int:
    """Train on the cluster, with a driver that survives neither this process nor the head of the cluster."""
    if os.environ.get(DRIVER):
        die_with_parent(signal.SIGTERM)
        return drive(cfg, commands, say)
    ray_package()
    stop = Stop()
    command = [sys.executable, "-m", "assay", *commands.first]
    # In a session of its own: a Ctrl-C reaches the learners once.
    driver = subprocess.Popen(command, env={**os.environ, DRIVER: "1"}, start_new_session=True)
    with stop.listening():
        while driver.poll() is None:
            while stop.sent < len(stop.requested):
                driver.send_signal(stop.requested[stop.sent])
                stop.sent += 1
            time.sleep(POLL_S)
    code = driver.returncode
    if code in (0, 2, *(128 + number for number in SIGNALS)) or stop.requested:
        return code if code >= 0 else 128 - code
    raise UserError(
        f"the connection to the Ray cluster was lost ({exit_reason(code)}): its head has ended, or cannot be reached; "
        f"start the cluster again, and resume with: assay train --resume {commands.run}"
    )


def drive(cfg: TrainConfig, commands: Commands, say: Callable[[str], None]) -> int:
    """Train on the cluster. Returns the exit code."""
    stop = Stop()
    with stop.listening():
        address = connect(cfg.cluster.address, say)
        cluster = resolved(cfg.cluster)
        logs = commands.run.parent / "ray-logs" / commands.run.name
        logs.mkdir(parents=True, exist_ok=True)
        resumes, tried = 0, time.monotonic()
        while True:
            with reserved(cluster, stop) as group:
                learners = Learners(cluster, address, group, commands, logs)
                ending = learners.run(stop, again=resumes > 0)
            if ending in (DONE, ERROR) or ending in STOPPED or stop.requested:
                return exit_code(ending, stop)
            if not learners.started and time.monotonic() < tried + cluster.start_timeout_s:
                time.sleep(RETRY_S)  # e.g. Ray has not noticed yet that a node is lost
                continue
            if resumes == cluster.restarts:
                raise UserError(
                    f"a learner has died ({ending}), and cluster.restarts = {cluster.restarts} is used up: see {logs}, "
                    f"and resume with: assay train --resume {commands.run}"
                )
            resumes, tried = resumes + 1, time.monotonic()
            say(
                f"a learner has died ({ending}): all start again from the last checkpoint "
                f"({resumes} of {plural(cluster.restarts, 'restart')})"
            )


def lost(error: Exception) -> str:
    """How a learner has ended whose actor is gone. Raises a `UserError` if the actor could not even start."""
    if "creation task" in str(error):
        cause = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise UserError(f"a node cannot start programs of assay ({cause}): install the same assay on all nodes")
    return f"its node or its process was lost: {excerpt(' '.join(str(error).split()), 300)}"


def resolved(cluster: ClusterConfig) -> ClusterConfig:
    """The settings with the numbers of GPUs, where the user has left them to the cluster."""
    gpus = int(ray_package().cluster_resources().get("GPU", 0) > 0)
    names = ("gpus_per_learner", "gpus_per_engine")
    return cluster.model_copy(update={name: gpus for name in names if getattr(cluster, name) < 0})


def exit_code(ending: str, stop: Stop) -> int:
    if ending in (DONE, ERROR):
        return int(ending.split()[-1])
    return 128 + (stop.requested[0] if stop.requested else signal.Signals[ending.split()[-1]])


@contextmanager
def reserved(cluster: ClusterConfig, stop: Stop) -> Iterator[str]:
    """The resources of all learners and engine servers. Yields the name of their placement group."""
    ray, name = ray_package(), secrets.token_hex(8)
    group = ray.util.placement_group(bundles(cluster), "SPREAD" if cluster.spread else "PACK", name)
    try:
        deadline = time.monotonic() + cluster.start_timeout_s
        ready = group.ready()
        while not ray.wait([ready], timeout=POLL_S)[0]:
            if stop.requested:
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise UserError(missing_resources(cluster))
        yield name
    finally:
        with suppress(Exception):  # of a cluster that has gone
            ray.util.remove_placement_group(group)


def bundles(cluster: ClusterConfig) -> list[dict[str, float]]:
    """Resources of each learner, and of each engine server that is not colocated with one."""
    learner = {"CPU": float(cluster.cpus_per_learner), "GPU": float(cluster.gpus_per_learner)}
    engine = {"CPU": float(cluster.cpus_per_engine), "GPU": float(cluster.gpus_per_engine)}
    apart = cluster.engines
    found = [dict(learner) for _ in range(cluster.learners)]
    if cluster.place == "colocated":
        for index in range(cluster.engines):
            found[index % cluster.learners]["CPU"] += engine["CPU"]
        apart = 0
    return [{kind: n for kind, n in bundle.items() if n} for bundle in [*found, *[engine] * apart]]


def missing_resources(cluster: ClusterConfig) -> str:
    ray = ray_package()
    wanted = bundles(cluster)
    need = {kind: sum(bundle.get(kind, 0.0) for bundle in wanted) for kind in ("CPU", "GPU")}
    each = describe_resources({kind: max(bundle.get(kind, 0.0) for bundle in wanted) for kind in need})
    return (
        f"the cluster did not have the resources after {cluster.start_timeout_s:g} s: the run needs "
        f"{describe_resources(need)} (at most {each} on one node); free of {plural(len(nodes()), 'node')} are "
        f"{describe_resources(ray.available_resources())}: lower cluster.learners or cluster.engines, or add nodes"
    )


class Learners:
    def __init__(self, cluster: ClusterConfig, address: str, group: str, commands: Commands, logs: Path) -> None:
        self.ray = ray_package()
        self.cluster, self.address, self.group, self.commands = cluster, address, group, commands
        self.logs = [logs / f"learner-{rank}.log" for rank in range(cluster.learners)]
        self.offsets = [0] * cluster.learners
        self.started = False
        self.actors = [self._actor(rank) for rank in range(cluster.learners)]

    def _actor(self, rank: int) -> Any:
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self.ray.util.get_placement_group(self.group), placement_group_bundle_index=rank
        )
        options = {"num_cpus": self.cluster.cpus_per_learner, "num_gpus": self.cluster.gpus_per_learner}
        return hosted_program(f"{self.commands.run.name}-learner-{rank}", **options, scheduling_strategy=strategy)

    def run(self, stop: Stop, again: bool) -> str:
        """Train. Returns how the learners have ended: the ending that decides about what follows."""
        try:
            self._start(again)
            endings = self._watch(stop)
        except self.ray.exceptions.RayActorError as error:
            return lost(error)
        finally:
            self._close()
        deaths = [ending for ending in endings if ending not in (DONE, ERROR, *STOPPED)]
        order = [*deaths, *(ending for ending in (ERROR, *STOPPED) if ending in endings), DONE]
        return order[0]

    def _start(self, again: bool) -> None:
        limit = self.cluster.start_timeout_s
        places = self.ray.get([actor.place.remote() for actor in self.actors], timeout=limit)
        lacking = set(self.ray.get([actor.enter.remote(os.getcwd()) for actor in self.actors], timeout=limit)) - {""}
        if lacking:
            raise UserError(
                f"the working directory {os.getcwd()} does not exist on {', '.join(sorted(lacking))}: the nodes of "
                "learners need the same folders, e.g. in a network file system or in their image"
            )
        if again:
            again = self.ray.get(self.actors[0].exists.remote(str(self.commands.run / "config.toml")))
        words = self.commands.again if again else self.commands.first
        on_node = [place["node_id"] for place in places]
        shared = {
            "address": self.address,
            "group": self.group,
            "run": str(self.commands.run),
            "devices": [place["devices"] for place in places],
            "cluster": self.cluster.model_dump(),
        }
        started = []
        for rank, (actor, place) in enumerate(zip(self.actors, places, strict=True)):
            local = on_node[:rank].count(place["node_id"])
            environment = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": 0 if place["devices"] else local,  # Ray shows each learner its GPU alone
                "LOCAL_WORLD_SIZE": on_node.count(place["node_id"]),
                "MASTER_ADDR": places[0]["node"],
                "MASTER_PORT": places[0]["ports"][0],
                "PYTHONUNBUFFERED": 1,
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                CLUSTER_MEMBER: json.dumps(shared | {"node": place["node"]}),
            }
            command = [sys.executable, "-m", "assay", *words]
            started.append(actor.start.remote(command, {key: str(value) for key, value in environment.items()}))
        self.ray.get(started, timeout=limit)
        self.started = True

    def _watch(self, stop: Stop) -> list[str]:
        """Pass on output and signals until all have ended, or one has, and the others do not follow."""
        endings: list[str | None] = [None] * len(self.actors)
        deadline = None
        while None in endings and (deadline is None or time.monotonic() < deadline):
            for number in stop.requested[stop.sent :]:
                for actor in self.actors:
                    actor.signal.remote(number)
                stop.sent += 1
            for rank in range(len(self.actors)):
                if endings[rank] is None:
                    endings[rank] = self._read(rank)
            if deadline is None and any(ending not in (None, DONE) for ending in endings):
                died = any(ending not in (None, DONE, ERROR, *STOPPED) for ending in endings)
                deadline = time.monotonic() + (0 if died else LAST_WORDS_S)
            time.sleep(POLL_S)
        return [ending for ending in endings if ending is not None]

    def _read(self, rank: int) -> str | None:
        """Show and store what a learner has written. Returns how it has ended."""
        while True:
            try:
                state = self.actors[rank].state.remote(self.offsets[rank])
                ended, output = self.ray.get(state, timeout=ANSWER_S)
            except self.ray.exceptions.GetTimeoutError:
                return None
            except self.ray.exceptions.RayActorError as error:
                return lost(error)
            if not ended:
                output = output[: output.rfind(b"\n") + 1]  # whole lines, and thus whole characters
            self.offsets[rank] += len(output)
            with self.logs[rank].open("ab") as log:
                log.write(output)
            if rank == 0:
                print(DUMPS.sub("", output.decode(errors="replace")), end="", flush=True)
            if not output:
                return ended

    def _close(self) -> None:
        """End all learners: those that still run are killed."""
        for actor in self.actors:
            with suppress(Exception):
                self.ray.kill(actor)
