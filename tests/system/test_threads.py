"""Time limits of work in other threads, and warnings about work that takes long."""

from __future__ import annotations

import time

import pytest
from waiting import until

from assay.system.threads import run_with_timeout, warn_after


def test_time_limit_and_warning_after_a_delay(recwarn: pytest.WarningsRecorder) -> None:
    assert run_with_timeout(0, lambda: 1) == run_with_timeout(60.0, lambda: 1) == 1
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        run_with_timeout(0.01, lambda: time.sleep(0.5))
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(60.0, lambda: 1 / 0)
    with warn_after(60.0, "too early"):
        pass
    with warn_after(0.01, "still running"):
        until(lambda: bool(recwarn.list), 10)
    assert [str(warning.message) for warning in recwarn.list] == ["still running"]
