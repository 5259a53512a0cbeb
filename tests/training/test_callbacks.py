"""Callbacks: which objects are accepted, and errors in them. How runs call them is tested with the Python API."""

from __future__ import annotations

from typing import Any

import pytest

from assay.training.callbacks import Callback, as_callback, notify
from assay.types import UserError


def test_functions_are_called_after_steps_and_errors_name_the_hook() -> None:
    calls: list[Any] = []
    hooks = [as_callback(lambda *args: calls.append(args)), Callback()]
    notify(hooks, "on_step", "run", 1, {"a": 2.0})
    notify(hooks, "on_stop", "run", {})
    assert calls == [("run", 1, {"a": 2.0})]

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(UserError, match="broken failed: ZeroDivisionError: no"):
        notify([as_callback(broken)], "on_step", "run", 1, {})
    for wrong in (3, Callback):
        with pytest.raises(UserError, match="must be a function"):
            as_callback(wrong)
