"""Tensor-parallel engines: requests that arrive while others run, aborts, weight updates and failures.

Two processes on gloo yield the same events at the same steps as one process.
"""

from __future__ import annotations

import signal
import threading

import pytest
from leader_parts import a_follower_fails_alone, arrivals, leader_cases, update_cases, with_leader
from processes import start
from torch.multiprocessing import ProcessRaisedException

from assay.engine.native.tensor_parallel import signals_deferred


@pytest.mark.slow
def test_requests_that_arrive_while_others_run_reach_followers_at_the_same_step() -> None:
    start(2, with_leader, arrivals, "all at once")


@pytest.mark.slow
def test_leader_with_failures_interrupts_dispatcher_and_different_arrivals_in_lockstep() -> None:
    start(2, leader_cases)


@pytest.mark.slow
def test_weight_updates_while_requests_run_in_lockstep_and_with_a_leader() -> None:
    start(2, update_cases)


@pytest.mark.slow
def test_a_follower_that_fails_where_the_leader_does_not_raises() -> None:
    with pytest.raises(ProcessRaisedException, match="failed where the leader did not"):
        start(2, a_follower_fails_alone)


def test_signals_are_handled_after_the_block_in_the_main_thread() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), signals_deferred(), signals_deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append("end of the block")
    assert reached and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signal_handlers_are_left_alone_in_other_threads() -> None:
    def work() -> None:
        with signals_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    found: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
