"""The worker pool with plain functions; tests/rewards/test_pool.py tests it with judges."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool_functions import FailsToLoad, imports, work

from assay.system.sandbox import Level, WorkerSettings, environment
from assay.system.spawn import BadMessage
from assay.system.worker_pool import MAX_CHUNK_CHARS, ItemFailure, StartFailed, WorkerPool, split_items


def pool_of(function: Callable[..., Any], timeout_s: float = 30.0, level: Level = "basic") -> WorkerPool[Any]:
    settings = WorkerSettings(pickle.dumps(function), timeout_s, 4.0, level, True, environment(level))
    return WorkerPool(settings, workers=1, parse=parse)


def parse(value: Any) -> Any:
    if value == "invalid":
        raise BadMessage("it is invalid")
    return value


def test_results_failures_and_lost_workers() -> None:
    """One pool for all, because starting workers takes most of the time."""
    pool = pool_of(work, timeout_s=0.6)
    items: list[tuple[Any, ...]] = [
        ("a",),
        ("raise", "reason"),
        ("set",),  # JSON has no sets
        ("exit", 3),
        ("invalid",),
        ("pause", 0.7),  # longer than the time limit
        ("sleep", 60),
        ("b",),
    ]
    counts: list[int] = []
    results = pool.map(items, counts.append)
    pool.close()
    assert counts and counts == sorted(counts) and counts[-1] < len(items)  # reported while it waits
    by_command = {item[0]: result for item, result in zip(items, results, strict=True)}
    assert [by_command[name] for name in ("a", "b", "pause")] == ["a", "b", "pause"]
    assert by_command["sleep"] == ItemFailure(timed_out=True)
    for name, word in (
        ("raise", "KeyError: 'reason'"),
        ("set", "TypeError"),
        ("exit", "code 3"),
        ("invalid", "invalid"),
    ):
        failure = by_command[name]
        assert isinstance(failure, ItemFailure) and not failure.timed_out and word in failure.detail
    with pytest.raises(RuntimeError, match="closed"):
        pool.map([("a",)])


def test_function_that_cannot_be_prepared_is_reported() -> None:
    pool = pool_of(FailsToLoad())
    with pytest.raises(StartFailed, match="no such library"):
        pool.map([()])
    pool.close()


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (7, 2), (64, 1), (1000, 3)])
def test_chunks_hold_all_items_in_order_and_are_small(count: int, workers: int) -> None:
    chunks = split_items([(str(index),) for index in range(count)], workers)
    assert [pair for chunk in chunks for pair in chunk] == [(index, (str(index),)) for index in range(count)]
    assert max(map(len, chunks)) <= 64 and len(chunks) >= min(count, workers)


def test_long_items_have_chunks_of_their_own() -> None:
    items = [("x" * size,) for size in (10, MAX_CHUNK_CHARS, 10, MAX_CHUNK_CHARS - 10, 10)]
    chunks = split_items(items, 1)
    assert all(sum(len(item[0]) for _, item in chunk) <= MAX_CHUNK_CHARS for chunk in chunks)
    assert sum(len(item[0]) for _, item in split_items(items, 1, per_receiver=1, scale=2)[0]) > MAX_CHUNK_CHARS


def test_pool_cannot_be_used_in_a_forked_process() -> None:
    pool = pool_of(work)
    child = os.fork()
    if not child:
        try:
            pool.map([("a",)])
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pool.close()


SLOW_MODULE = "import time\ntime.sleep(0.7)\n"


def test_first_imports_do_not_count_against_the_time_limit(tmp_path: Path) -> None:
    for name in ("slow_one", "slow_two"):
        (tmp_path / f"{name}.py").write_text(SLOW_MODULE)
    pool = pool_of(imports, timeout_s=0.6)
    results = pool.map([(str(tmp_path), name) for name in ("slow_one", "slow_two", "slow_one")])
    pool.close()
    assert results == ["slow_one", "slow_two", "slow_one"]
