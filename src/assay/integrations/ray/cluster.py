"""The connection to Ray: a Ray of this run alone, or a running cluster that it joins."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from assay.config import CLUSTER_MEMBER
from assay.types import UserError, describe_error, missing_extra, plural

NAMESPACE = "assay"
LOOPBACK = "127.0.0.1"
# When an actor ends, Ray would kill its child processes: those that end what servers, judges and tools have started.
KEEP_SUPERVISORS = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
CONNECT_S = 10.0  # time limit of a connection to the head
LOGS = "see gcs_server.err and raylet.err in /tmp/ray/session_latest/logs"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ray_package(setting: str = "cluster.kind") -> ModuleType:
    """The package, without reports of its use to its makers. A call before or after a connection is an error: Ray would
    connect by itself, to any cluster that it finds.

    `setting`: that needs it, for messages.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ImportError:
        raise missing_extra(f"{setting} = 'ray'", "ray") from None
    return ray


def membership() -> dict[str, Any] | None:
    """What a process of a run must know of its cluster; None outside of a cluster."""
    text = os.environ.get(CLUSTER_MEMBER)
    return json.loads(text) if text else None


def connect(address: str, say: Callable[[str], None] | None = None) -> str:
    """Connect this process, unless it is connected; the address of the cluster.

    `address`: of a running cluster, or "auto" for the one that RAY_ADDRESS names or that runs on this machine; empty
    for a new Ray on this machine, which ends with this process. `say` gets what joining a cluster exposes.
    """
    if not address and "ray" not in sys.modules:  # Ray reads these when it is imported
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = ray_package()
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    check_reachable(address)
    given: dict[str, Any] = {"address": address or "local"}
    local = not address or address.startswith(LOOPBACK)
    if not address:
        given["include_dashboard"] = False
    if node := (membership() or {}).get("node") or (LOOPBACK if local else ""):
        given["_node_ip_address"] = node
    if local:  # Ray would replace the address by another one of this machine, and listen on all
        ray._private.services.resolve_ip_for_localhost = lambda host: host
    try:
        with _own_signals():
            ray.init(**given, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        where = f"cluster.address = '{address}'" if address else "a Ray on this machine"
        remedy = "start a cluster with `ray start --head`, or leave cluster.address empty" if address else LOGS
        raise UserError(f"cannot connect to {where} ({describe_error(error)[:300]}): {remedy}") from error
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # deaths are reported by those who watch
    found = ray.get_runtime_context().gcs_address
    if say is not None and (address or not found.startswith(LOOPBACK)):
        say(exposure(found))
    return found


def check_reachable(address: str) -> None:
    """Raise a `UserError` at once if nothing answers there: Ray tries for minutes."""
    if "://" in address:
        raise UserError(f"cluster.address = '{address}': give host:port of the cluster's head, without a scheme")
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({describe_error(error)}): start one with `ray start --head`, or "
            "correct cluster.address (or RAY_ADDRESS)"
        ) from error


def exposure(address: str) -> str:
    """What a run opens to others when it joins a cluster that was started by somebody else."""
    return (
        f"joining the Ray cluster at {address}: whoever can submit jobs there can run programs as you on its machines, "
        "read the prompts, answers and weights of this run, and stop it"
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the signal handlers of this process, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def nodes() -> list[dict[str, Any]]:
    """The nodes that are alive."""
    return [node for node in ray_package().nodes() if node["Alive"]]


def describe_resources(resources: Mapping[str, float]) -> str:
    """E.g. "8 CPUs and 1 GPU"."""
    shown = [plural(int(resources.get(kind, 0)), kind) for kind in ("CPU", "GPU")]
    return " and ".join(shown)
