"""Tensor-parallel ranks generate the same as one process, in lockstep and with a leader.

With a leader, two processes on gloo yield the same events at the same steps as one process: requests that arrive while
others run, aborts, weight updates and failures.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from pathlib import Path

import pytest
from group_parts import FAMILIES, other_cases, serve_alone, serve_cases
from leader_parts import a_follower_fails_alone, alike, arrivals, leader_cases, update_cases, with_leader
from native_parts import MODES
from processes import start
from torch.multiprocessing import ProcessRaisedException

from assay.engine.native.tensor_parallel import signals_deferred
from assay.models.decoder import Decoder
from assay.models.parallel import split_dim


def check(world: int, tp: int, cases: list[tuple[str, str]], folder: Path) -> None:
    start(world, serve_cases, folder, tp, cases)
    for family, mode in cases:
        files = [(folder / f"{family}-{mode}-{rank}.json").read_text() for rank in range(world)]
        assert len(set(files)) == 1, "ranks have different results"  # to the last bit
        found, expected = json.loads(files[0]), serve_alone(family, mode)
        assert alike(found, expected) and found["before"] != found["after"]
        assert expected["stats"]["preemptions"] > 0 or not MODES[mode].blocks  # type: ignore[index]


@pytest.mark.slow
def test_two_tensor_parallel_ranks_generate_the_same_as_one_process(tmp_path: Path) -> None:
    check(2, 2, [("qwen2", "windows"), *((family, "all at once") for family in FAMILIES)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "family"), [(4, "llama"), (2, "qwen3")])
def test_four_processes_as_one_or_several_tensor_parallel_groups(tp: int, family: str, tmp_path: Path) -> None:
    check(4, tp, [(family, "all at once")], tmp_path)


@pytest.mark.slow
def test_tensor_parallel_fingerprints_errors_memory_and_broken_weights() -> None:
    start(2, other_cases)


def test_split_dim_of_every_weight() -> None:
    """Outputs of projections into a block, inputs of those out of it, tokens; norms and biases of the latter not."""
    names = {name for spec in FAMILIES.values() for name, _ in Decoder(spec).named_parameters()}
    layer = "model.layers.0."
    assert {name.removeprefix(layer): split_dim(name) for name in names if not re.search(r"layers\.[1-9]", name)} == {
        "model.embed_tokens.weight": 0,
        "lm_head.weight": 0,
        "model.norm.weight": None,
        "input_layernorm.weight": None,
        "post_attention_layernorm.weight": None,
        "pre_feedforward_layernorm.weight": None,
        "post_feedforward_layernorm.weight": None,
        "self_attn.q_norm.weight": None,
        "self_attn.k_norm.weight": None,
        **{f"self_attn.{one}_proj.{kind}": 0 for one in "qkv" for kind in ("weight", "bias")},
        **{f"mlp.{one}_proj.{kind}": 0 for one in ("gate", "up") for kind in ("weight", "bias")},
        **{f"{one}_proj.weight": 1 for one in ("self_attn.o", "mlp.down")},
        **{f"{one}_proj.bias": None for one in ("self_attn.o", "mlp.down")},
    }


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
