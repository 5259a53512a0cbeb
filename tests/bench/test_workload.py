"""Workloads: lengths, requests, ids, and the shapes of models."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import pytest
import torch

from assay.bench.workload import SHAPES, TABLE, Workload, random_model


@pytest.mark.parametrize(("shape", "weights"), [("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("7b", 7_615_616_512)])
def test_shapes_have_the_parameter_counts_of_the_published_models(shape: str, weights: int) -> None:
    assert SHAPES[shape]().parameters == weights  # of the published checkpoints


def test_random_weights_are_normal_and_the_same_for_the_same_seed() -> None:
    first, again, other = (dict(random_model(SHAPES["tiny"](), torch.device("cpu"), s).weights()) for s in (3, 3, 4))
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        if "norm" in name:
            assert bool((weight == 1).all())
        else:
            assert not torch.equal(weight, other[name])
            assert abs(weight.std().item() - 0.02) < 0.02 * 5 / math.sqrt(2 * weight.numel())


def test_the_long_tail_follows_the_documented_distribution() -> None:
    lengths = Workload(lengths="longtail", prompts=64, new=1024).new_tokens
    assert len(lengths) == 4096 and min(lengths) >= 1 and max(lengths) == 1024
    # Against the distribution itself, in terms of the error function; 4,096 draws.
    share_below = {bound: sum(length <= bound for length in lengths) / 4096 for bound in (30, 118, 480)}
    for bound, share in share_below.items():
        z = (math.log(bound + 0.5) - math.log(0.115 * 1024)) / 1.1
        expected = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 4096)
    assert 185 < statistics.fmean(lengths) < 215
    assert lengths == Workload(lengths="longtail", prompts=64, new=1024).new_tokens
    assert lengths != Workload(lengths="longtail", prompts=64, new=1024, seed=1).new_tokens


def test_requests_of_fixed_lengths() -> None:
    work = Workload(shape="tiny", prompts=3, samples=5, prompt_tokens=7, new=11, top_k=4, min_p=0.1)
    requests = work.make_requests(20, run=0)
    assert [len(request.prompt_ids) for request in requests] == [7, 7, 7]
    assert all(0 <= token < 20 for request in requests for token in request.prompt_ids)
    (params,) = {request.params for request in requests}
    assert (params.n, params.max_new_tokens, params.top_k, params.min_p) == (5, 11, 4, 0.1)
    assert len({request.seed for request in requests}) == len({tuple(r.prompt_ids) for r in requests}) == 3
    assert work.sequences == work.batch == 15 and work.max_length == 64
    assert requests == work.make_requests(20, run=0)
    prompts = {tuple(request.prompt_ids) for request in requests}
    assert not prompts & {tuple(request.prompt_ids) for request in work.make_requests(20, run=1)}


def test_ids_distinguish_workloads_of_engines(tmp_path) -> None:
    longtail = TABLE[2]
    changes: list[dict[str, Any]] = [{"prompt_tokens": 64}, {"top_p": 0.9}, {"temperature": 0.0}, {"max_batch": 7}]
    changed = [dataclasses.replace(work, **change) for work in (TABLE[0], longtail) for change in changes]
    changes = [{"prompts": 32}, {"requests": 99}, {"new": 9}]
    changed += [dataclasses.replace(longtail, **change) for change in changes]
    ids = [work.id for work in (*TABLE, *changed)]
    assert len(set(ids)) == len(ids) and ids[:3] == ["gen-0.5b-16x64x256", "gen-1.5b-16x64x256", "gen-0.5b-longtail"]
    assert dataclasses.replace(TABLE[0], top_p=0.9).id == "gen-0.5b-16x64x256-top_p0.9"
    assert dataclasses.replace(TABLE[0], quantize="fp8").id == "gen-0.5b-16x64x256-fp8"
    (tmp_path / "SmolLM2-135M").mkdir()
    assert Workload(model=f"{tmp_path}/SmolLM2-135M/").label == "smollm2-135m"
    assert Workload(model="some/Model-1.5B.gguf").label == "model-1.5b"
    assert Workload(model="org/Name-0.5B").label == "name-0.5b"
