"""Background work gives way to requests."""

from __future__ import annotations

import threading
import time

import pytest

from assay.web import activity as module
from assay.web.activity import Activity


def test_work_waits_until_the_last_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 60.0)
    activity, done = Activity(), threading.Event()
    activity.give_way()  # no request: it returns at once
    first, second = activity, activity
    with first:
        second.__enter__()
        worker = threading.Thread(target=lambda: (activity.give_way(), done.set()))
        worker.start()
    assert activity.requests == 1 and not done.wait(0.1)
    second.__exit__()
    worker.join(30)
    assert done.is_set()


def test_work_continues_while_there_are_always_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    monkeypatch.setattr(module, "WORK_S", 60.0)
    activity = Activity()
    with activity:
        activity.give_way()
        monkeypatch.setattr(module, "WAIT_S", 60.0)
        start = time.monotonic()
        activity.give_way()  # it has just waited
        assert time.monotonic() - start < 30


def test_requests_at_the_same_time_share_their_time() -> None:
    activity = Activity()
    assert activity.share(0.1) == 0.1
    with activity, activity:
        assert activity.share(0.1) == 0.05
