"""How runs end. `assay.build.export` is tested with the command, in tests/cli/test_export.py."""

from __future__ import annotations

import pytest

from assay.build.execute import is_lost_peer


def test_errors_of_a_lost_peer_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_lost_peer(gone)
    assert not is_lost_peer(RuntimeError("shapes do not match")) and not is_lost_peer(ValueError("timed out"))
    monkeypatch.delenv("WORLD_SIZE")
    assert not is_lost_peer(gone)
