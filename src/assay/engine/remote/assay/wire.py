"""Requests and events as JSON, for an engine behind HTTP. Every number survives exactly.

Arrays are base64 of little-endian numbers: token ids as int32, log-probabilities as float64, which holds float32 too.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from assay.engine.base import Event, Failed, Finished, Request, SamplingParams, TokenChunk
from assay.types import Completion, Finish

IDS, FLOATS = "<i4", "<f8"
INTEGERS = {"n", "top_k", "max_new_tokens", "min_new_tokens"}
MAX_INTEGER = 1 << 31


class WireError(ValueError):
    """A message is not what this module writes; the text says how, in one line."""


def pack(values: Sequence[int] | Sequence[float], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode()


def unpack(text: Any, dtype: str) -> list[Any]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).tolist()
    except (TypeError, ValueError, binascii.Error) as error:
        raise WireError(f"an array is not base64 of whole numbers ({error})") from None


def request_to_json(request: Request) -> dict[str, Any]:
    """Everything but `keep` and `continues`: the server keeps no sequences."""
    assert request.continues is None, "kept sequences need an engine in this process"
    ids = pack(request.prompt_ids, IDS)
    return {
        "prompt_ids": ids,
        "params": asdict(request.params),
        "seed": request.seed,
        "name": request.name,
        "stream": request.stream,
    }


def request_from_json(tree: Mapping[str, Any]) -> Request:
    """The types are checked here, the values by the engine."""
    seed, name, stream = tree.get("seed"), tree.get("name", ""), tree.get("stream", False)
    if type(seed) is not int or not isinstance(name, str) or type(stream) is not bool:
        raise WireError("'seed' must be an integer, 'name' a text and 'stream' true or false")
    params = tree.get("params", {})
    if not isinstance(params, dict):
        raise WireError("'params' must be an object")
    ids = unpack(tree.get("prompt_ids"), IDS)
    return Request(ids, params_from_json(params), seed, name[:200], stream=stream)


def params_from_json(tree: Mapping[str, Any]) -> SamplingParams:
    known = {field.name for field in fields(SamplingParams)}
    if unknown := tree.keys() - known:
        raise WireError(f"unknown sampling parameter '{min(unknown)[:60]}'")
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name in ("stop_token_ids", "forbidden_token_ids", "stop"):
            kind = str if name == "stop" else int
            if not isinstance(value, list) or not all(type(one) is kind for one in value):
                raise WireError(f"'{name}' must be a list of {'texts' if kind is str else 'token ids'}")
            values[name] = tuple(value)
        elif name in INTEGERS:
            if type(value) is not int or abs(value) > MAX_INTEGER:
                raise WireError(f"'{name}' must be an integer")
            values[name] = value
        elif type(value) not in (int, float) or not math.isfinite(value):
            raise WireError(f"'{name}' must be a number")
        else:
            values[name] = float(value)
    return SamplingParams(**values)


def event_to_json(event: Event) -> dict[str, Any]:
    if isinstance(event, Failed):
        return {"error": event.error}
    if isinstance(event, TokenChunk):
        return {"sample": event.sample, "ids": pack(event.token_ids, IDS), "logprobs": pack(event.logprobs, FLOATS)}
    completion = event.completion
    same = completion.sampling_logprobs == completion.engine_logprobs
    return {
        "sample": event.sample,
        "finish": completion.finish.value,
        "ids": pack(completion.token_ids, IDS),
        "logprobs": pack(completion.engine_logprobs, FLOATS),
        "sampling_logprobs": None if same else pack(completion.sampling_logprobs, FLOATS),
        "version": completion.version,
        "version_spans": completion.version_spans,
        "kept_mass": completion.kept_mass,
        "entropy": completion.entropy,
    }


def event_from_json(tree: Any, request_id: int) -> Event:
    try:
        if "error" in tree:
            return Failed(request_id, str(tree["error"]))
        sample, ids, logprobs = int(tree["sample"]), unpack(tree["ids"], IDS), unpack(tree["logprobs"], FLOATS)
        if len(ids) != len(logprobs):
            raise WireError("there are not as many log-probabilities as tokens")
        if "finish" not in tree:
            return TokenChunk(request_id, sample, ids, logprobs)
        sampling = tree["sampling_logprobs"]
        completion = Completion(
            ids,
            logprobs,
            list(logprobs) if sampling is None else unpack(sampling, FLOATS),
            Finish(tree["finish"]),
            int(tree["version"]),
            tree["kept_mass"],
            tree["entropy"],
            version_spans=tuple((int(version), int(count)) for version, count in tree["version_spans"]),
        )
        return Finished(request_id, sample, completion)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"an event is damaged ({type(error).__name__}: {error})") from None
