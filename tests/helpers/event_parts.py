"""Engines of all backends, and a recorder of their events, shared by tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import torch
from engine_parts import small_decoder
from native_parts import SPECS, Mode, engine_for, transformers_model, words

from assay.engine import (
    Engine,
    Event,
    Failed,
    Finished,
    HFEngine,
    NativeEngine,
    Request,
    SamplingParams,
    TokenChunk,
    make_engine,
)
from assay.engine.sequence import Column, RowState
from assay.models.base import HFModel, PolicyModel
from assay.models.decoder import Decoder
from assay.types import Completion

BACKENDS = ("native", "hf")
GPU_LIKE = Mode(max_batch=8, window=4, ahead=1)  # results are read one window late


class Recorder:
    """Records events by request and sample. No event may follow the last one of a request or a sample."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[int, int], list[TokenChunk]] = defaultdict(list)
        self.completions: dict[tuple[int, int], Completion] = {}
        self.errors: dict[int, str] = {}

    def record(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.request_id not in self.errors, "an event follows a Failed event"
            if isinstance(event, Failed):
                self.errors[event.request_id] = event.error
                continue
            key = event.request_id, event.sample
            assert key not in self.completions, "an event follows a Finished event"
            if isinstance(event, Finished):
                self.completions[key] = event.completion
            else:
                self.chunks[key].append(event)

    def tokens(self, request_id: int) -> list[list[int]]:
        return [completion.token_ids for completion in self.group(request_id)]

    def group(self, request_id: int) -> list[Completion]:
        return [self.completions[key] for key in sorted(self.completions) if key[0] == request_id]

    def streamed(self, request_id: int, sample: int) -> tuple[list[int], list[float]]:
        chunks = self.chunks[request_id, sample]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        return ids, [value for chunk in chunks for value in chunk.logprobs]

    def ids(self) -> set[int]:
        """Ids of all requests that had an event."""
        return {key[0] for key in (*self.chunks, *self.completions)} | set(self.errors)


def run(engine: Engine, recorder: Recorder | None = None) -> Recorder:
    """Step until all requests are finished."""
    recorder = recorder or Recorder()
    while events := engine.step():
        recorder.record(events)
    return recorder


def run_slowly(engine: NativeEngine, recorder: Recorder, between: Callable[[int], None]) -> Recorder:
    """Step without waiting; `between` is called with the number of the iteration after each."""
    iteration = 0
    while engine.incoming or engine.scheduler.unfinished:
        recorder.record(engine.step(wait=False))
        between(iteration)
        iteration += 1
        assert iteration < 10_000, "the engine does not finish"
    recorder.record(engine.step())
    return recorder


def add_all(engine: Engine, requests: Iterable[Request]) -> list[int]:
    return [engine.add(request) for request in requests]


@cache
def policy(backend: str, seed: int = 0, dtype: torch.dtype | None = None) -> PolicyModel:
    """A model with the same weights for every backend; must not be changed."""
    decoder = small_decoder(SPECS["llama"], seed)
    model = HFModel(transformers_model(SPECS["llama"], decoder)) if backend == "hf" else decoder
    return model.to(dtype or torch.float32)


def build(backend: str, model: PolicyModel | None = None, mode: Mode | None = None) -> Engine:
    """`mode` is for native engines; others use its `max_batch` only."""
    model, mode = model or policy(backend), mode or Mode(max_batch=8)
    if isinstance(model, Decoder):
        return engine_for(model, mode, decode=words)
    engine = make_engine("hf", model, device="cpu", dtype=torch.float32, max_batch=mode.max_batch, decode=words)
    assert isinstance(engine, HFEngine)
    return engine


def native(
    model: Decoder,
    mode: Mode = GPU_LIKE,
    *,
    kv_on_update: str = "recompute",
    dtype: torch.dtype = torch.float64,
    max_length: int | None = None,
) -> NativeEngine:
    engine = engine_for(model, mode, dtype=dtype, decode=words, max_length=max_length)
    engine.kv_on_update = kv_on_update  # type: ignore[assignment]
    return engine


def varied_requests(stream: bool = False, max_new_tokens: int = 16) -> list[Request]:
    """Greedy and sampled, with and without truncation, with stop tokens, stop strings and minimum lengths."""
    plain = SamplingParams(n=2, max_new_tokens=max_new_tokens)
    kinds = [
        plain,
        replace(plain, temperature=0.0, n=1),
        replace(plain, temperature=0.8, top_k=9, top_p=0.9, stop_token_ids=(3, 5, 7)),
        replace(plain, stop=("a", "d", "h", "m", "q", "zz"), n=3),
        replace(plain, stop_token_ids=tuple(range(12)), min_new_tokens=10),
        replace(plain, min_p=0.1, forbidden_token_ids=(1, 2, 3), stop=("k", "s", "o"), n=1),
    ]
    lengths = (5, 21, 16, 3, 11, 8)
    return [
        Request([(7 * i + 3 * j) % 61 for j in range(length)], params, seed=50 + i, stream=stream)
        for i, (length, params) in enumerate(zip(lengths, kinds, strict=True))
    ]


def assert_nothing_left(engine: Engine) -> None:
    """No request, row or block is in use, and nothing is kept."""
    assert isinstance(engine, NativeEngine | HFEngine)
    outputs = engine.outputs
    assert not (outputs.jobs or outputs.events or outputs.stop_jobs or outputs.stream_jobs or engine.incoming)
    if isinstance(engine, HFEngine):
        assert not (engine.batch or engine.waiting or engine.kept)
        return
    scheduler = engine.scheduler
    assert not (scheduler.running or scheduler.waiting or scheduler.pending or scheduler.kept)
    assert engine.blocks.in_use == 0
    assert bool((engine.rows.ints[:, Column.STATE] == RowState.IDLE).all())


def assert_equal_completions(ours: Sequence[Completion], theirs: Sequence[Completion], tolerance: float = 1e-5) -> None:
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.finish == b.finish and a.versions == b.versions
        for name in ("engine_logprobs", "sampling_logprobs", "kept_mass", "entropy"):
            x, y = (torch.tensor(getattr(one, name), dtype=torch.float64) for one in (a, b))
            assert torch.allclose(x, y, rtol=0, atol=tolerance), name
