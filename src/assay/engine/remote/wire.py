"""Requests and events as JSON, for an engine behind HTTP. Every number survives exactly.

Arrays are base64 of little-endian numbers: token ids as int32, log-probabilities as float64, which holds float32 too.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeGuard

import numpy as np

from assay.engine.base import Event, Failed, Finished, Request, SamplingParams, TokenChunk
from assay.types import Completion, Finish

IDS, FLOATS = "<i4", "<f8"
INTEGERS = {"n", "top_k", "max_new_tokens", "min_new_tokens"}
MAX_INTEGER = (1 << 31) - 1
MAX_LONG = (1 << 63) - 1  # of seeds and versions
ROUNDING = 1e-3  # by which means of probabilities and entropies may be outside their range


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
    plain = {"seed": request.seed, "name": request.name, "stream": request.stream}
    return {"prompt_ids": pack(request.prompt_ids, IDS), "params": asdict(request.params), **plain}


def request_from_json(tree: Mapping[str, Any]) -> Request:
    """Types and sizes of numbers are checked here, values by the engine."""
    seed, name, stream = tree.get("seed"), tree.get("name", ""), tree.get("stream", False)
    if not is_integer(seed, -MAX_LONG - 1, MAX_LONG) or not isinstance(name, str) or type(stream) is not bool:
        raise WireError("'seed' must be an integer of 64 bits, 'name' a text and 'stream' true or false")
    params = tree.get("params", {})
    if not isinstance(params, dict):
        raise WireError("'params' must be an object")
    ids = unpack(tree.get("prompt_ids"), IDS)
    return Request(ids, params_from_json(params), seed, name[:200], stream=stream)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_integer(value: Any, low: int = 0, high: int = MAX_INTEGER) -> TypeGuard[int]:
    return type(value) is int and low <= value <= high


def is_number(value: Any, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> bool:
    """Whether a value is a finite number in a range. Integers of JSON may be too large for a float."""
    return type(value) in (int, float) and low <= value <= high


def params_from_json(tree: Mapping[str, Any]) -> SamplingParams:
    known = {field.name for field in fields(SamplingParams)}
    if unknown := tree.keys() - known:
        raise WireError(f"unknown sampling parameter '{min(unknown)[:60]}'")
    values: dict[str, Any] = {}
    for name, value in tree.items():
        if name in ("stop_token_ids", "forbidden_token_ids", "stop"):
            valid = is_text if name == "stop" else is_integer
            if not isinstance(value, list) or not all(map(valid, value)):
                raise WireError(f"'{name}' must be a list of {'texts' if name == 'stop' else 'token ids'}")
            values[name] = tuple(value)
        elif name in INTEGERS:
            if not is_integer(value, -MAX_INTEGER):
                raise WireError(f"'{name}' must be an integer")
            values[name] = value
        elif not is_number(value):
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
    if not isinstance(tree, dict):
        raise WireError("an event is not an object")
    if "error" in tree:
        return Failed(request_id, str(tree["error"]))
    sample, ids, logprobs = tree.get("sample"), unpack(tree.get("ids"), IDS), unpack(tree.get("logprobs"), FLOATS)
    if not is_integer(sample):
        raise WireError("the index of a sample is not an integer")
    if len(ids) != len(logprobs):
        raise WireError("there are not as many log-probabilities as tokens")
    if "finish" not in tree:
        return TokenChunk(request_id, sample, ids, logprobs)
    return Finished(request_id, sample, completion_from_json(tree, ids, logprobs))


def completion_from_json(tree: Mapping[str, Any], ids: list[int], logprobs: list[float]) -> Completion:
    finish, version, spans = tree["finish"], tree.get("version"), tree.get("version_spans")
    mass, entropy, sampling = tree.get("kept_mass"), tree.get("entropy"), tree.get("sampling_logprobs")
    if finish not in list(Finish):
        raise WireError("the reason for the end of a completion is unknown")
    if not is_integer(version, high=MAX_LONG) or not are_spans(spans, version, len(ids)):
        raise WireError("the versions of the weights are not integers that fit to the tokens")
    if mass is not None and not is_number(mass, -ROUNDING, 1 + ROUNDING):
        raise WireError("'kept_mass' is not a probability")
    if entropy is not None and not is_number(entropy, -ROUNDING):
        raise WireError("'entropy' is not a number of at least 0")
    sampling = list(logprobs) if sampling is None else unpack(sampling, FLOATS)
    joined = tuple((span_version, count) for span_version, count in spans)
    return Completion(ids, logprobs, sampling, Finish(finish), version, mass, entropy, version_spans=joined)


def are_spans(spans: Any, version: int, tokens: int) -> TypeGuard[list[list[int]]]:
    """Whether a value is empty, or pairs of version and number of tokens that begin with `version`."""
    if not isinstance(spans, list) or not all(isinstance(span, list) and len(span) == 2 for span in spans):
        return False
    valid = all(is_integer(span_version, high=MAX_LONG) and is_integer(count, 1) for span_version, count in spans)
    return valid and (not spans or (spans[0][0] == version and sum(count for _, count in spans) == tokens))
