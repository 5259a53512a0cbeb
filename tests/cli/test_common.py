"""Output in distributed runs."""

from __future__ import annotations

import pytest

from assay.cli.common import is_lost_peer, is_main, make_console, should_report
from assay.cli.main import main


def as_rank(monkeypatch: pytest.MonkeyPatch, world: int, rank: int, local: int) -> None:
    for name, value in (("WORLD_SIZE", world), ("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))


def test_only_one_process_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = []
    for world, rank, local in (
        (1, 0, 0),
        (4, 0, 0),
        (4, 1, 1),
        (4, 2, 0),
        (1, 3, 3),
    ):  # the last: RANK of an unrelated program
        as_rank(monkeypatch, world, rank, local)
        make_console().note(f"rank {rank} of {world}")
        assert main(["train", "nowhere.toml"]) == 2
        output = capsys.readouterr()
        assert output.out == (f"rank {rank} of {world}\n" if is_main() else "")
        assert output.err.count("nowhere.toml") == should_report()
        result.append((is_main(), should_report()))
    assert result == [
        (True, True),
        (True, True),
        (False, False),
        (False, True),
        (True, True),
    ]  # one per node reports errors


def test_errors_of_a_lost_peer_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    as_rank(monkeypatch, 2, 1, 1)
    assert is_lost_peer(gone)
    assert not is_lost_peer(RuntimeError("shapes do not match")) and not is_lost_peer(ValueError("timed out"))
    as_rank(monkeypatch, 1, 0, 0)
    assert not is_lost_peer(gone)
