"""The planner: amounts of work by counting, what fits where, and divisions of GPUs."""

from __future__ import annotations

from dataclasses import replace

import fit_cost  # bench/fit_cost.py
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from assay.bench.workload import SHAPES
from assay.build import plan
from assay.build.plan import GIB, GPUS, STATES, Cluster, StepWork, fit_engine, fit_learner, layouts, update_line
from assay.build.simulate import drawn_lengths
from assay.models import Decoder
from assay.types import UserError

SEVEN, H200, H100 = SHAPES["7b"](), GPUS["h200"], GPUS["h100"]
WORK = StepWork(64, 8, 256, 1024, drawn_lengths(512, 1024, 50))


def test_the_factors_are_those_of_the_measurements() -> None:
    found = {row["id"]: row for row in fit_cost.rows()}
    factors = [*fit_cost.fit_decoding(found), *fit_cost.fit_training(found)]
    assert [getattr(plan, name) for name in fit_cost.NAMES] == pytest.approx(factors, rel=0.01)
    others = [
        values for row in found.values() if row["id"] not in fit_cost.FITTED and (values := fit_cost.predicted(row))
    ]
    assert len(others) >= 6
    for _, expected, measured in others:
        assert expected == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
def test_the_work_of_a_token_is_what_torch_counts(shape: str) -> None:
    spec = replace(SHAPES[shape](), max_length=256)
    model = Decoder(spec)
    assert sum(p.numel() for p in model.parameters()) == spec.parameters
    with FlopCounterMode(display=False) as counter:
        model.unembed(model.hidden(torch.arange(128) % 50, [128])).sum().backward()
    products, _, _ = plan.train_features(spec, H200, 128)  # attention on a CPU is not counted
    assert products * H200.flops * 128 == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_an_engine_takes_as_few_gpus_as_hold_it() -> None:
    alone = fit_engine(SEVEN, WORK, H200, 8)
    assert alone is not None and alone.tp == 1
    assert alone.weights == pytest.approx(2 * SEVEN.parameters / GIB)
    assert alone.weights + alone.cache < H200.memory
    bytes_per_token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads, bfloat16
    assert alone.rows == min(1024, int(alone.cache * GIB / bytes_per_token / (256 + WORK.mean)))
    small = GPUS["rtx4090"]
    shared = fit_engine(SEVEN, replace(WORK, limit=50_000), small, 8)
    assert shared is not None and shared.tp == 2
    assert fit_engine(SEVEN, replace(WORK, limit=1_000_000), small, 1) is None


def test_learners_take_the_fastest_setting_that_fits() -> None:
    small = fit_learner(SHAPES["0.5b"](), WORK, Cluster(), 1)
    assert small is not None and (small.precision, small.recompute) == ("float32", False)
    seven = fit_learner(SEVEN, WORK, Cluster(), 1)
    assert seven is not None and seven.precision == "8bit" and not seven.recompute
    tight = fit_learner(SEVEN, replace(WORK, limit=3000), Cluster(gpu="h100"), 1)
    assert tight is not None and tight.precision == "bfloat16" and not tight.recompute
    shared = fit_learner(SEVEN, WORK, Cluster(8, "h100"), 8)
    assert shared is not None and shared.precision == "float32"
    assert shared.parts["weights, gradients, optimizer"] == pytest.approx(
        STATES["float32"] * SEVEN.parameters / 8 / GIB
    )
    for fit, gpu in ((small, H200), (seven, H200), (tight, H100), (shared, H100)):
        assert fit.peak < gpu.memory and fit.budget >= WORK.longest
    assert fit_learner(SEVEN, WORK, Cluster(gpu="rtx4090"), 1) is None


def test_updates_are_divided_and_held_up_by_the_network() -> None:
    def seconds(gpus: int, per_node: int) -> float:
        cluster = Cluster(gpus, "h200", per_node)
        fit = fit_learner(SEVEN, WORK, cluster, gpus)
        assert fit is not None
        return update_line(SEVEN, WORK, cluster, replace(fit, budget=2048, recompute=False)).at(10**6)

    assert seconds(8, 8) == pytest.approx(seconds(1, 8) / 8, rel=0.1)
    assert seconds(8, 1) > 1.5 * seconds(8, 8)


def test_an_update_takes_as_long_as_its_longest_sequence_on_one_gpu() -> None:
    spec, work = SHAPES["0.5b"](), replace(WORK, limit=16_384)

    def seconds(gpus: int) -> float:
        fit = fit_learner(spec, work, Cluster(gpus), gpus)
        assert fit is not None
        return update_line(spec, work, Cluster(gpus), fit).at(work.tokens)

    alone = work.longest * plan.train_seconds(spec, H200, work.sequence)
    assert seconds(4) == pytest.approx(seconds(1) / 4, rel=0.1)
    assert alone <= seconds(1024) <= seconds(512) < 1.1 * alone


def test_divisions_use_all_gpus_and_more_of_them_are_faster() -> None:
    fastest = []
    for gpus in (1, 4, 8):
        found = layouts(SEVEN, WORK, Cluster(gpus))
        assert [made.result.step for made in found] == sorted(made.result.step for made in found)
        for made in found:
            together = made.engine_gpus + made.learner.gpus
            assert made.engine_gpus == made.learner.gpus == gpus if made.colocated else together == gpus
        assert any(made.colocated for made in found) and (gpus == 1) == all(made.colocated for made in found)
        fastest.append(found[0].result.step)
    assert fastest[0] > 2 * fastest[1] > 2 * fastest[2]
    assert all(made.colocated for made in layouts(SEVEN, WORK, Cluster(8), staleness=0))


@pytest.mark.parametrize(
    ("cluster", "limit", "message"),
    [
        (Cluster(2, "rtx4090"), 1024, r"cannot be trained on 2 x RTX4090 .*: plan for --gpus 8 or more"),
        (Cluster(1, "rtx4090", 1), 1_000_000, "no engine of 1 or fewer RTX4090 GPUs holds 14 GiB of weights"),
    ],
)
def test_what_does_not_fit_is_refused(cluster: Cluster, limit: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layouts(SEVEN, replace(WORK, limit=limit), cluster)


def test_unknown_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"unknown GPU 'h300'.* known: h200, h100"):
        Cluster(gpu="h300")


def test_kernels_for_few_rows_are_counted_where_they_run() -> None:
    rows = {(shape, gpu): plan.few_rows_of(SHAPES[shape](), GPUS[gpu]) for shape in ("1.5b", "7b") for gpu in GPUS}
    assert {key for key, count in rows.items() if count} == {("1.5b", gpu) for gpu in ("h200", "h100", "b200")}
    decoding = plan.decoding(SHAPES["1.5b"](), H200)
    assert decoding.at(16, 0) < decoding.at(17, 0) - decoding.saved / 2 and plan.few_rows_of(SEVEN, H200, tp=2) == 0


def test_gpus_that_do_both_hold_the_moments_beside_the_cache() -> None:
    (alone,) = layouts(SEVEN, WORK, Cluster())
    held = (STATES[alone.learner.precision] - 2.0) * SEVEN.parameters / GIB
    assert alone.engine.weights + alone.engine.cache + held <= H200.memory
    assert alone.engine.weights + alone.learner.peak <= H200.memory  # its cache is asleep
    separate = fit_engine(SEVEN, WORK, H200, 8)
    assert separate is not None and separate.cache - alone.engine.cache == pytest.approx(held)
