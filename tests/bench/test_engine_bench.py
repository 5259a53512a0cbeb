"""Engine benchmark: timing, token counts, kernel categories, agreement with the trainer, start-up; episodes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from assay.bench import engine
from assay.bench.engine import (
    Chatter,
    EpisodeOptions,
    Episodes,
    Options,
    evenly_spaced,
    measure,
    measure_episodes,
    mismatch,
    row_id,
    split_by_tokens,
)
from assay.bench.workload import SHAPES, Workload, random_model
from assay.engine import Request, SamplingParams
from assay.types import Completion, Finish

TINY = Workload(shape="tiny", prompts=2, samples=3, prompt_tokens=9, new=8)
CPU = torch.device("cpu")


class Clock:
    """A clock by which the timed spans take the given seconds."""

    def __init__(self, seconds: list[float]) -> None:
        self.times = [time for at, span in enumerate(seconds) for time in (100.0 * at, 100.0 * at + span)]

    def perf_counter(self) -> float:
        return self.times.pop(0)


def test_speed_is_the_median_without_the_warm_up_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "time", Clock([4.0, 1.0, 8.0, 2.0]))
    (row,) = measure(TINY, Options(device="cpu", dtype="float32"))
    assert row["id"] == row_id("gen-tiny-2x3x8-prompt_tokens9", "cpu", "float32")
    assert row["system"] == "assay" and row["logprobs"] is True and row["preemptions"] == 0
    assert (row["tokens_per_s"], row["runs"], row["first_run_tokens_per_s"]) == (24.0, [48.0, 6.0, 24.0], 12.0)
    assert row["mismatch_tokens"] == 48
    assert row["mismatch_mean_abs"] < 1e-5 and 1 <= row["mismatch_max_ratio"] < 1.0001
    assert row["peak_memory_gib"] is None and "parts_ms" not in row
    assert (row["dtype"], row["device"], row["max_batch"], row["mean_new"]) == ("float32", "cpu", 6, 8.0)
    words = "--shape tiny --prompts 2 --samples 3 --prompt-tokens 9 --new 8 --device cpu --dtype float32"
    assert row["command"] == f"assay bench engine {words}"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_mismatch_against_log_probabilities_in_float64(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SCORED_TOKENS", 40)  # several passes
    model = random_model(SHAPES["tiny"](), CPU, seed=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform
    wide = random_model(SHAPES["tiny"](), CPU, seed=2).double()
    with torch.no_grad():
        wide.lm_head.weight.mul_(20)
    generator = torch.Generator().manual_seed(0)
    requests, groups, shifts = [], [], []
    for length in (3, 6):
        prompt = torch.randint(512, (length,), generator=generator).tolist()
        requests.append(Request(prompt, SamplingParams(n=4, temperature=temperature), seed=0))
        group = []
        for new in (1, 5, 9, 14):
            tokens = torch.randint(512, (new,), generator=generator).tolist()
            ids = torch.tensor(prompt + tokens)
            with torch.no_grad():
                logits = wide.unembed(wide.hidden(ids, [len(ids)])) / (temperature or 1.0)
            every = torch.log_softmax(logits, -1)
            exact = torch.stack([every[length - 1 + at, token] for at, token in enumerate(tokens)])
            shift = torch.rand(new, generator=generator, dtype=torch.float64) - 0.5
            shifts.append(shift)
            logprobs = (exact + shift).tolist()
            group.append(Completion(tokens, logprobs, logprobs, Finish.LENGTH))
        groups.append(group)
    result = mismatch(model, requests, groups, torch.float32)
    expected = torch.cat(shifts).abs()
    assert result["mismatch_tokens"] == 2 * (1 + 5 + 9 + 14)
    assert result["mismatch_mean_abs"] == pytest.approx(expected.mean().item(), abs=1e-5)
    assert result["mismatch_max_ratio"] == pytest.approx(math.exp(expected.max().item()), abs=1e-4)
    rounded = mismatch(model, requests, groups, torch.bfloat16)  # computed in bfloat16: close, not equal
    assert 1e-6 < abs(rounded["mismatch_mean_abs"] - result["mismatch_mean_abs"]) < 0.1


def test_sequences_are_evenly_spaced_and_split_by_tokens() -> None:
    pairs = [([0] * 10, Completion([index], [0.0], [0.0], Finish.LENGTH)) for index in range(200)]
    chosen = [completion.token_ids[0] for _, completion in evenly_spaced(pairs, 64)]
    assert len(set(chosen)) == 64 and chosen[0] == 0 and chosen[-1] >= 196 and chosen == sorted(chosen)
    assert len(evenly_spaced(pairs[:5], 64)) == 5
    long = [([0] * length, pairs[0][1]) for length in (10_000, 10_000, 99_999, 5)]
    assert [len(part) for part in split_by_tokens(long)] == [1, 1, 1, 1]
    assert [len(part) for part in split_by_tokens(pairs[:3])] == [3]


KERNELS = {
    "attention": ("_attend", "_merge", "void flash::flash_fwd_kernel<cutlass::bfloat16_t>"),
    "matmul": ("nvjet_tst_192x192_64x4_1x2_h_bz_TNT", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"),
    "norm_rope_activation": ("_rms_norm", "_rope_store", "_activation"),
    "sampling": ("draw_kernel", "truncate_kernel", "void at_cuda_detail::cub::DeviceMergeSortMergeKernel"),
    "other": ("distribution_elementwise_grid_stride_kernel<normal_and_transform>", "Memcpy DtoH (Device -> Pinned)"),
}


def test_kernel_categories() -> None:
    for category, kernels in KERNELS.items():
        assert {engine.kernel_category(kernel) for kernel in kernels} == {category}


def test_kernel_times_per_step_exclude_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[int, int]] = []

    def kernel_times(engine: object, requests: list[Request]) -> Counter[str]:
        steps = requests[0].params.max_new_tokens
        runs.append((steps, sum(request.params.n for request in requests)))
        return Counter({"matmul": 50 + 3 * steps, "attention": 7 + 2 * steps, "other": 1})

    monkeypatch.setattr(engine, "kernel_times", kernel_times)
    requests = [Request([1], SamplingParams(n=5, max_new_tokens=30), seed=0)] * 3
    times = engine.kernel_times_per_step(None, requests, batch=8)  # type: ignore[arg-type]
    assert runs == [(1, 8), (30, 8)]
    assert times["matmul"] == 3 and times["attention"] == 2 and times["other"] == 0 and times["total"] == 5
    assert set(times) == {"attention", "matmul", "sampling", "norm_rope_activation", "other", "total"}


@pytest.mark.gpu
def test_kernel_times_and_memory_on_a_gpu() -> None:
    work = Workload(shape="0.5b", prompts=2, samples=4, prompt_tokens=32, new=16)
    (row,) = measure(work, Options(device="cuda", repeat=1, parts=True))
    assert row["parts_ms"]["matmul"] > 0 and row["parts_ms"]["attention"] > 0
    assert 0.9 < row["peak_memory_gib"] < 40 and row["dtype"] == "bfloat16"
    assert row["mismatch_mean_abs"] < 0.05


SMALL = Episodes(episodes=12, samples=3, step_tokens=40, max_batch=8)
OPTIONS = EpisodeOptions(device="cpu", dtype="float32", repeat=2)


def test_a_row_for_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = iter([9.0, 8.0, 3.0, 2.0, 5.0, 1.0])  # rounds and own pace alternate
    times = iter([time for at in range(6) for time in (100.0 * at, 100.0 * at + next(spans))])
    monkeypatch.setattr(engine, "now", lambda device: next(times))
    rounds, own = measure_episodes(SMALL, OPTIONS)
    assert (rounds["seconds"], rounds["runs"], rounds["first_run_s"]) == (4.0, [3.0, 5.0], 9.0)
    assert (own["seconds"], own["runs"], own["first_run_s"]) == (1.5, [2.0, 1.0], 8.0)
    assert own["same_as_in_rounds"] == 12 and "same_as_in_rounds" not in rounds
    assert own["decode_steps"] < rounds["decode_steps"] and own["rows_a_step"] > rounds["rows_a_step"]
    for name in ("actions", "action_tokens_median", "action_tokens_max", "decoded_tokens"):
        assert own[name] == rounds[name]
    expected = sum(1 + prompt.fields["episode_seed"] % 8 for prompt in Chatter().prompts("train")[:4]) * 3
    assert own["actions"] == expected and 1 <= own["action_tokens_median"] <= own["action_tokens_max"] <= 40
    assert (own["system"], own["device"], own["dtype"], own["episodes"]) == ("assay", "cpu", "float32", 12)
    assert rounds["id"].endswith("-rounds") and own["id"].endswith("-own-pace")
    words = "--episodes 12 --samples 3 --step-tokens 40 --max-batch 8 --device cpu --dtype float32 --repeat 2"
    assert own["command"] == rounds["command"] == f"assay bench episodes {words}"
