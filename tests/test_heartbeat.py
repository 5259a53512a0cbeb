"""Heartbeats between real processes; the intervals are shortened, nothing else is replaced."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import process_tree
import pytest
import torch.distributed as dist
import torch.multiprocessing
from waiting import until

from assay import mesh
from assay.mesh import Heartbeat, Peer

CONTEXT = torch.multiprocessing.get_context("forkserver")
HOST = socket.gethostname()


class Ranks:
    """Processes with nothing but a heartbeat, and what they report."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.set_forkserver_preload(["torch.distributed", "test_heartbeat"])

    def start(self, target: Callable[..., None], *args: object) -> torch.multiprocessing.Process:
        process = CONTEXT.Process(target=target, args=(self.folder, self.store.port, *args))
        process.start()
        self.started.append(process)
        return process

    def beating(self, world: int, timeout_s: float, warn_s: float = 0.5) -> list[torch.multiprocessing.Process]:
        started = [self.start(beat, rank, world, timeout_s, warn_s) for rank in range(world)]
        for rank in range(world):
            self.store.wait([f"assay/beat/{rank}"])
        return started

    def said(self, rank: int) -> str:
        file = self.folder / f"stderr-{rank}"
        return file.read_text() if file.exists() else ""

    def wait_for(self, text: str, rank: int) -> None:
        until(lambda: text in self.said(rank))

    def close(self) -> None:
        for process in self.started:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    found.close()


def start_beating(folder: Path, port: int, rank: int, world: int, timeout_s: float, warn_s: float) -> Heartbeat:
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    mesh.INTERVAL_S, mesh.WARN_S = 0.05, warn_s
    return Heartbeat(dist.TCPStore("127.0.0.1", port), rank, world, timeout_s)


def beat(*args: object) -> None:
    start_beating(*args)  # type: ignore[arg-type]
    while True:
        signal.pause()


def test_a_missing_heartbeat_and_its_return_are_each_reported_once() -> None:
    peer = Peer("rank 3 on node7")
    said = [peer.observe(counter, 20.0) for counter in (1, 1, 1, 1, 2, 2, 2, 2)]
    assert said[:4] == ["", "", "rank 3 on node7 has not responded for 40 s; waiting", ""]
    assert said[4:] == ["rank 3 on node7 responds again after 60 s", "", said[2], ""]


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_can_continue(ranks: Ranks) -> None:
    _, stopped, _ = ranks.beating(3, timeout_s=0)
    os.kill(stopped.pid, signal.SIGSTOP)
    ranks.wait_for(f"assay: rank 1 on {HOST} has not responded for", 2)
    os.kill(stopped.pid, signal.SIGCONT)
    ranks.wait_for(f"assay: rank 1 on {HOST} responds again after", 2)
    assert "rank 1" not in ranks.said(0)  # one rank reports it
    assert all(process.is_alive() for process in ranks.started)


@pytest.mark.slow
def test_a_rank_without_heartbeat_ends_all_others_with_one_message(ranks: Ranks) -> None:
    _, silent, _ = ranks.beating(3, timeout_s=3)
    os.kill(silent.pid, signal.SIGSTOP)
    for rank in (0, 2):
        ranks.started[rank].join(60)
        assert ranks.started[rank].exitcode == 2
    lines = [line for rank in (0, 2) for line in ranks.said(rank).splitlines() if "ending the run" in line]
    assert len(lines) == 1 and lines[0].startswith(f"assay: rank 1 on {HOST} has not responded for")


@pytest.mark.slow
def test_several_consecutive_ranks_that_vanish_are_noticed(ranks: Ranks) -> None:
    survivor, *gone = ranks.beating(4, timeout_s=3)
    for process in gone:
        os.kill(process.pid, signal.SIGKILL)
    survivor.join(60)
    assert survivor.exitcode == 2 and f"rank 3 on {HOST}" in ranks.said(0)


def hold_store(folder: Path, _: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port.tmp").write_text(str(store.port))
    (folder / "port.tmp").rename(folder / "port")
    while True:
        signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_an_unreachable_store_ends_the_ranks(ranks: Ranks, tmp_path: Path, signum: signal.Signals) -> None:
    holder = ranks.start(hold_store)
    until((tmp_path / "port").exists)
    ranks.store = dist.TCPStore("127.0.0.1", int((tmp_path / "port").read_text()))
    pair = ranks.beating(2, timeout_s=3)
    os.kill(holder.pid, signum)
    for rank, process in enumerate(pair):
        process.join(60)
        assert process.exitcode == 2 and "the rendezvous store" in ranks.said(rank)


def compute(*args: object) -> None:
    start_beating(*args)  # type: ignore[arg-type]
    end = time.monotonic() + 4
    while time.monotonic() < end:
        (torch.rand(700, 700) @ torch.rand(700, 700)).sum()
        sum(range(2_000_000))


@pytest.mark.slow
def test_a_busy_rank_keeps_its_heartbeat(ranks: Ranks) -> None:
    pair = [ranks.start(compute, rank, 2, 3.0, 2.0) for rank in range(2)]
    for rank, process in enumerate(pair):
        process.join(60)
        assert process.exitcode == 0 and not ranks.said(rank)


def wait_in_an_exchange(*args: object) -> None:
    mesh.NOTICE_S = 0.3
    found = start_beating(*args)  # type: ignore[arg-type]
    with found.waiting():
        time.sleep(60)


def test_a_rank_that_others_wait_for_is_named(ranks: Ranks) -> None:
    ranks.start(wait_in_an_exchange, 0, 2, 0.0, 30.0)
    ranks.start(beat, 1, 2, 0.0, 30.0)
    ranks.wait_for(f"s for rank 1 on {HOST}, which is alive and busy", 0)
    assert not ranks.said(1)


def launch(folder: Path, port: int) -> None:
    """A launcher with one rank; its stop signals do not reach the rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = "here"
    if os.fork() == 0:
        beat(folder, port, 0, 1, 0.0, 30.0)
    while True:
        signal.pause()


def test_a_rank_whose_launcher_was_killed_ends(ranks: Ranks) -> None:
    launcher = ranks.start(launch)
    ranks.store.wait(["assay/beat/0"])
    (rank,) = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(launcher.pid, signal.SIGKILL)
    assert process_tree.ended([int(rank)], within=60)
    assert "assay: the launcher of rank 0 has ended: stopping" in ranks.said(0)
