"""Generation engines: the interface, the native and the hf backend, and `make_engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from assay.engine.base import (
    Capabilities,
    Engine,
    EngineInfo,
    Event,
    Failed,
    Finished,
    Request,
    RequestError,
    SamplingParams,
    TokenChunk,
    WeightSource,
    generate,
)
from assay.engine.dispatch import Dispatcher, EngineClient
from assay.engine.hf import HFEngine
from assay.engine.native.engine import KvOnUpdate, NativeEngine
from assay.engine.outputs import Decode
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.types import UserError, unknown_name

__all__ = [
    "ENGINES",
    "Capabilities",
    "Dispatcher",
    "Engine",
    "EngineClient",
    "EngineInfo",
    "Event",
    "Failed",
    "Finished",
    "HFEngine",
    "NativeEngine",
    "Request",
    "RequestError",
    "SamplingParams",
    "TokenChunk",
    "WeightSource",
    "generate",
    "make_engine",
]
MAX_BATCH = {"cpu": 256, "cuda": 1024}  # default number of sequences that are decoded concurrently


def make_native(model: PolicyModel, **options: Any) -> Engine:
    if not isinstance(model, Decoder):
        raise UserError("the native engine serves the Llama, Qwen2 and Qwen3 families: use engine 'hf' for this model")
    return NativeEngine(model.spec, **options)


def make_hf(
    model: PolicyModel,
    *,
    memory: float,
    prefill_tokens: int,
    lend: bool,
    kv_on_update: KvOnUpdate,
    group: dist.ProcessGroup | None,
    **options: Any,
) -> Engine:
    """Options that only the native engine supports are accepted and not used."""
    if group is not None and group.size() > 1:
        raise UserError("the hf engine cannot be split over devices: set parallel.tp to 1")
    if isinstance(model, Decoder):
        raise UserError("the hf engine serves models loaded through transformers: use engine 'native' for this model")
    return HFEngine(model, **options)


def without_group(make: Backend) -> Backend:
    """Wrap a user's backend, which serves a whole model on one device."""

    def build(model: PolicyModel, *, group: dist.ProcessGroup | None, **options: Any) -> Engine:
        if group is not None and group.size() > 1:
            raise UserError("a custom engine cannot be split over devices: set parallel.tp to 1")
        return make(model, **options)

    return build


Backend = Callable[..., Engine]  # called with a model and keyword options such as device and dtype
ENGINES: dict[str, Backend] = {"native": make_native, "hf": make_hf}


def make_engine(
    backend: str | Backend,
    model: PolicyModel,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    max_batch: int = 0,
    max_length: int | None = None,
    memory: float = 0.0,
    prefill_tokens: int = 0,
    decode: Decode | None = None,
    group: dist.ProcessGroup | None = None,
    lend: bool = False,
    kv_on_update: KvOnUpdate = "recompute",
) -> Engine:
    """Build an engine with its own copy of the model's weights, as version 0.

    `backend`: a key of `ENGINES`, "auto" to choose by the kind of model, or a function that gets the model and all
    options below except `group`.
    `max_batch`, `memory` (GiB of KV cache), `prefill_tokens`: 0 leaves the choice to the engine.
    `lend`: `sleep` releases the memory of the KV cache.
    `kv_on_update`: whether `update_weights` recomputes or keeps the KV cache of running sequences.
    `group`: ranks that serve one model together; every rank must make this call and all later calls in the same order.
    """
    if backend == "auto":
        backend = "native" if isinstance(model, Decoder) else "hf"
    if isinstance(backend, str) and backend not in ENGINES:
        raise unknown_name("engine", backend, ["auto", *ENGINES])
    make = ENGINES[backend] if isinstance(backend, str) else without_group(backend)
    engine = make(
        model,
        device=device,
        dtype=dtype,
        max_batch=max_batch or MAX_BATCH.get(torch.device(device).type, MAX_BATCH["cpu"]),
        max_length=max_length,
        memory=memory,
        prefill_tokens=prefill_tokens,
        decode=decode,
        group=group,
        lend=lend,
        kv_on_update=kv_on_update,
    )
    engine.update_weights(model, version=0)
    return engine
