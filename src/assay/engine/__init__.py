"""Generation engines: the interface, the native and the hf backend, and `make_engine`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from assay.engine.base import (
    BaseEngine,
    Capabilities,
    Engine,
    EngineInfo,
    EngineOptions,
    Event,
    Failed,
    Finished,
    Request,
    RequestError,
    SamplingParams,
    TokenChunk,
    WeightSource,
)
from assay.engine.client import connect, generate, run_sync
from assay.engine.hf import HFEngine
from assay.engine.native.engine import NativeEngine
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.types import UserError, unknown_name

__all__ = [
    "ENGINES",
    "BaseEngine",
    "Capabilities",
    "Engine",
    "EngineInfo",
    "EngineOptions",
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
    "connect",
    "generate",
    "make_engine",
    "run_sync",
]


Backend = Callable[..., BaseEngine]  # called with a model and the fields of `EngineOptions` as keyword arguments


def make_native(model: PolicyModel, **options: Any) -> BaseEngine:
    if not isinstance(model, Decoder):
        raise UserError("the native engine does not implement this model's family: use engine 'hf' for this model")
    return NativeEngine(model.spec, **options)


def make_hf(model: PolicyModel, **options: Any) -> BaseEngine:
    if isinstance(model, Decoder):
        raise UserError("the hf engine serves models loaded through transformers: use engine 'native' for this model")
    return HFEngine(model, **options)


def without_group(make: Backend, name: str = "a custom engine") -> Backend:
    """Wrap a backend that serves a whole model on one device."""

    def build(model: PolicyModel, *, group: dist.ProcessGroup | None, **options: Any) -> BaseEngine:
        if group is not None and group.size() > 1:
            raise UserError(f"{name} cannot be split over devices: set parallel.tp to 1")
        return make(model, **options)

    return build


# A backend in another process is given as "module:name", which is imported when it is used.
ENGINES: dict[str, Backend | str] = {
    "native": make_native,
    "hf": without_group(make_hf, "the hf engine"),
    "assay": "assay.engine.remote.assay:AssayEngine",
    "vllm": "assay.integrations.vllm:VLLMEngine",
    "sglang": "assay.integrations.sglang:SGLangEngine",
    "openai": "assay.integrations.openai:refuse_weights",  # commands that need no weights build it themselves
}


def make_engine(
    backend: str | Backend, model: PolicyModel, settings: Mapping[str, Any] | None = None, **options: Any
) -> BaseEngine:
    """Build an engine with its own copy of the model's weights, as version 0.

    `backend`: a key of `ENGINES`, "auto" to choose by the kind of model, or a function that gets the model and all
    fields of `EngineOptions` except `group`, as keyword arguments.
    `settings`: arguments that only this backend has. `options`: fields of `EngineOptions`; `device` and `dtype` are
    required. With `group`, every rank must make this call and all later calls in the same order.
    """
    if backend == "auto":
        backend = "native" if isinstance(model, Decoder) else "hf"
    if isinstance(backend, str) and backend not in ENGINES:
        raise unknown_name("engine", backend, ["auto", *ENGINES])
    for name, default in (("quantize", ""), ("kv_cache_dtype", "auto")):
        if options.get(name, default) != default and backend != "native":
            raise UserError(f"engine.{name} is for the engine native: remove it, or set engine.name = 'native'")
    make = ENGINES[backend] if isinstance(backend, str) else without_group(backend)
    if isinstance(make, str):
        make = pkgutil.resolve_name(make)
    engine = make(model, **vars(EngineOptions(**options)), **(settings or {}))
    engine.update_weights(model, version=0)
    return engine
