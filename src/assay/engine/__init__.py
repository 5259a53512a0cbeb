"""Generation engines: requests in, completions out."""

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
BATCH = {"cpu": 256, "cuda": 1024}  # sequences decoded at once, unless told otherwise


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
    """Budgets of memory and prefill, sleeping, and weight updates while requests run are the native engine's."""
    if group is not None and group.size() > 1:
        raise UserError("the hf engine cannot be split over devices: set parallel.tp to 1")
    if isinstance(model, Decoder):
        raise UserError("the hf engine serves models loaded through transformers: use engine 'native' for this model")
    return HFEngine(model, **options)


def without_group(make: Backend) -> Backend:
    """A backend that serves a whole model on one device."""

    def build(model: PolicyModel, *, group: dist.ProcessGroup | None, **options: Any) -> Engine:
        if group is not None and group.size() > 1:
            raise UserError("an engine of your own cannot be split over devices: set parallel.tp to 1")
        return make(model, **options)

    return build


Backend = Callable[..., Engine]  # called with a model and, by name, with options such as device and dtype
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

    `backend`: a key of `ENGINES`, "auto" to choose by the kind of model, or a function of the caller's own. The latter
    gets the model and all options below except `group`.
    A `max_batch`, `memory` (GiB for keys and values) or `prefill_tokens` of 0 leaves the choice to the engine.
    `lend`: `sleep` releases the memory of the KV cache.
    `kv_on_update`: whether `update_weights` recomputes or keeps the KV cache of running sequences.
    `group`: ranks that hold one model together, each of which makes this call and all that follow, alike.
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
        max_batch=max_batch or BATCH.get(torch.device(device).type, BATCH["cpu"]),
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
