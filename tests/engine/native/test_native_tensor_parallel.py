"""Tensor-parallel ranks in lockstep generate the same as one process.

Two processes on gloo yield the same events at the same steps as one process: requests that arrive while others run,
aborts and weight updates.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from group_parts import FAMILIES, other_cases, serve_alone, serve_cases
from lockstep_parts import alike, lockstep_cases
from native_parts import MODES
from processes import start

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
def test_requests_and_weight_updates_that_arrive_while_others_run() -> None:
    start(2, lockstep_cases)
