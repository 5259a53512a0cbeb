"""A stand-in for an SGLang server with a small model, for quick tests.

It rejects every request that SGLang would not accept: sglang_requests.json has the fields and types of SGLang's request
classes (see dev/sglang_requests.py). Besides, it rejects unknown fields, which SGLang ignores.
"""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import threading
import time
import typing
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from http_parts import Answer
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file

from assay.models.decoder import Decoder
from assay.models.spec import spec_to_hf

RULES: dict[str, Any] = json.loads((Path(__file__).parent / "sglang_requests.json").read_text())
SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": -1, "max_new_tokens": 128, "min_new_tokens": 0, "ignore_eos": False}


class KnownTypes(dict):
    """Names in the types of SGLang. Types of its own, which tests do not send, are not checked."""

    def __missing__(self, name: str) -> Any:
        return getattr(typing, name, Any)


@cache
def adapter(kind: str) -> TypeAdapter:
    names = {one.__name__: one for one in (str, int, float, bool, dict)}
    return TypeAdapter(eval(kind, {"__builtins__": {}}, KnownTypes(names)))


def problem_of(fields: dict[str, dict[str, Any]], body: Any) -> str:
    """What SGLang's class does not accept; empty if it accepts all fields."""
    if not isinstance(body, dict):
        return f"{body!r:.40} is not an object"
    for name, value in body.items():
        if name not in fields:
            return f"there is no field '{name}'"
        try:
            adapter(fields[name]["type"]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            return f"{name} = {value!r:.40} is not {fields[name]['type']}: {error.errors()[0]['msg']}"
    missing = [name for name, rule in fields.items() if rule["required"] and name not in body]
    return f"the field '{missing[0]}' is missing" if missing else ""


class SGLangUnpickler(pickle.Unpickler):
    """Loads what SGLang loads, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if not any(f"{module}.".startswith(prefix) for prefix in RULES["modules_of_tensors"]):
            raise pickle.UnpicklingError(f"SGLang does not load {module}.{name}")
        return super().find_class(module, name)


class FakeSGLang:
    """Call it with a path and a body. Samples one token at a time, so that a pause or an abort can interrupt."""

    def __init__(self, model: Decoder, decode: Any, **changes: Any) -> None:
        self.model, self.decode = copy.deepcopy(model), decode
        self.context, self.dtype, self.memory_saver, self.cpu_backup = 120, "float32", True, True
        self.architecture, self.end_tokens, self.token_s = spec_to_hf(model.spec)["architectures"][0], (), 0.0
        self.workers = 1
        self.__dict__.update(changes)
        self.paused = False
        self.released: set[str] = set()
        self.running: dict[str, bool] = {}  # by request id: whether it is to be aborted
        self.awake = threading.Condition()
        self.version = "default"
        self.calls: list[str] = []
        self.refused: list[str] = []  # requests that SGLang would not accept
        self.aborted: list[str] = []

    def __call__(self, path: str, body: Any) -> Answer:
        url = urlsplit(path)
        self.calls.append(url.path)
        rule = RULES["endpoints"].get(url.path)
        if rule is None:
            return self.refuse(404, f"no endpoint {url.path}")
        if unknown := set(parse_qs(url.query)) - set(rule["query"]):
            return self.refuse(422, f"{url.path}: no parameter {unknown}")
        if rule["fields"] is not None and (problem := problem_of(rule["fields"], body)):
            return self.refuse(422, f"{url.path}: {problem}")
        if rule["fields"] is None and body is not None:
            return self.refuse(422, f"{url.path} has no body")
        return getattr(self, url.path.strip("/"))(**(body or {}))

    def refuse(self, status: int, message: str) -> Answer:
        self.refused.append(message)
        return status, {"error": {"message": message}}

    # -- description

    def health(self) -> Answer:
        return 200, b""

    def server_info(self) -> Answer:
        info = {"dtype": self.dtype, "tp_size": self.workers, "pp_size": 1, "dp_size": 1, "version": RULES["version"]}
        info |= {"enable_memory_saver": self.memory_saver, "enable_weights_cpu_backup": self.cpu_backup}
        return 200, info | {"max_req_input_len": self.context - 6, "context_length": self.context}

    def model_info(self) -> Answer:
        return 200, {"architectures": [self.architecture], "weight_version": self.version}

    # -- control

    def pause_generation(self, mode: str) -> Answer:
        assert mode == "abort"
        with self.awake:
            self.paused = True
            self.running = dict.fromkeys(self.running, True)
            self.awake.wait_for(lambda: not self.running, timeout=30)
        return 200, {"status": "ok"}

    def continue_generation(self) -> Answer:
        with self.awake:
            self.paused = False
            self.awake.notify_all()
        return 200, {"status": "ok"}

    def abort_request(self, rid: str) -> Answer:
        with self.awake:
            hit = [one for one in self.running if one.startswith(rid)]
            self.running |= dict.fromkeys(hit, True)
            self.aborted += hit
        return 200, b""

    def flush_cache(self) -> Answer:
        return (400, b"Flush cache failed.\n") if self.running else (200, b"Cache flushed.\nPlease check.\n")

    def release_memory_occupation(self, tags: list[str]) -> Answer:
        if self.running or self.released & set(tags):
            return self.refuse(500, "SGLang would end here: it has requests, or has released this before")
        self.released |= set(tags)
        if "weights" in tags and not self.cpu_backup:
            self.forget()
        return 200, None

    def resume_memory_occupation(self, tags: list[str]) -> Answer:
        if set(tags) - self.released:
            return self.refuse(500, "SGLang would end here: this was not released")
        self.released -= set(tags)
        return 200, None

    @torch.no_grad()
    def forget(self) -> None:
        for weight in self.model.parameters():
            weight.fill_(float("nan"))

    # -- weights

    @torch.no_grad()
    def load(self, weights: Any, version: str) -> Answer:
        if "weights" in self.released:
            return self.refuse(500, "SGLang would end here: the memory of the weights is released")
        targets = dict(self.model.weights())
        for name, weight in weights:
            if targets[name].shape != weight.shape:
                return 400, {"success": False, "message": f"size mismatch for {name}"}
            targets[name].copy_(weight)
        self.version = version
        return 200, {"success": True, "message": "Success"}

    def update_weights_from_disk(
        self, model_path: str, load_format: str, flush_cache: bool, weight_version: str
    ) -> Answer:
        if load_format != "auto":
            return 400, {"success": False, "message": "Failed to get model loader"}
        files = sorted(Path(model_path).glob("*.safetensors"))
        return self.load(((n, w) for file in files for n, w in load_file(file).items()), weight_version)

    def update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, flush_cache: bool, weight_version: str
    ) -> Answer:
        """As SGLang reads its format "flattened_bucket": slices of bytes, with a type and a shape."""
        assert load_format == "flattened_bucket" and len(serialized_named_tensors) == self.workers
        bucket = SGLangUnpickler(io.BytesIO(base64.b64decode(serialized_named_tensors[0], validate=True))).load()
        weights = [
            (one.name, bucket["flattened_tensor"][one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape))
            for one in bucket["metadata"]
        ]
        return self.load(weights, weight_version)

    # -- samples

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model.unembed(self.model.hidden(torch.tensor(ids), [len(ids)])).double()

    def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        return_logprob: bool,
        rid: str = "",
        logprob_start_len: int = -1,
        token_ids_logprob: list[int] | None = None,
        top_logprobs_num: int = 0,
        stream: bool = False,
    ) -> Answer:
        if problem := problem_of(RULES["sampling_params"], sampling_params):
            return self.refuse(400, f"sampling_params: {problem}")
        for token in token_ids_logprob or ():
            if token >= self.model.vocab_size:
                text = f"token_ids_logprob contains out-of-vocabulary token id {token}; valid range is"
                return 400, {"error": {"message": f"{text} [0, {self.model.vocab_size})."}}
        if len(input_ids) >= self.context - 6:
            return 400, {"error": {"message": "The input is longer than the model's context length"}}
        rid = rid or str(time.monotonic_ns())
        with self.awake:
            self.awake.wait_for(lambda: not self.paused, timeout=30)  # as SGLang, before anything else is done
            if self.released:
                return self.refuse(500, "SGLang would end here: its memory is released")
            self.running[rid] = False
        try:
            answer = self.sample(rid, input_ids, SAMPLING_DEFAULTS | sampling_params)
        finally:
            with self.awake:
                del self.running[rid]
                self.awake.notify_all()
        if logprob_start_len == 0:
            rows = self.logits(input_ids).log_softmax(-1)
            values = [None, *(float(rows[i, t]) for i, t in enumerate(input_ids[1:]))]
            ids = [t if t < self.model.vocab_size - 1 else 0 for t in input_ids]  # as SGLang clips them
            answer["meta_info"]["input_token_logprobs"] = [[v, t, None] for v, t in zip(values, ids, strict=True)]
        return 200, answer

    def sample(self, rid: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        ids: list[int] = []
        logprobs: list[float] = []
        seed = params.get("sampling_seed")
        generator = torch.Generator().manual_seed(seed if seed is not None else torch.seed() % 2**62)
        reason: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        stops = {*params.get("stop_token_ids", ()), *self.end_tokens}
        while len(ids) < params["max_new_tokens"]:
            if self.running[rid]:
                reason = {"type": "abort", "message": "Abort", "status_code": None, "err_type": None}
                break
            time.sleep(self.token_s)
            scores, probabilities = self.distribution([*prompt, *ids], len(ids), params, stops)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token in stops and not params["ignore_eos"]:
                reason = {"type": "stop", "matched": token}
                break
            if found := [text for text in params.get("stop", ()) if text in self.decode(ids)]:
                reason = {"type": "stop", "matched": found[0]}
                break
        rows = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        meta = {"id": rid, "finish_reason": reason, "weight_version": self.version, "output_token_logprobs": rows}
        return {"text": self.decode(ids), "output_ids": ids, "meta_info": meta}

    def distribution(
        self, ids: list[int], drawn: int, params: dict[str, Any], stops: set[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities that SGLang reports, which are before truncation, and probabilities after it."""
        logits = self.logits(ids)[-1]
        for token, bias in params.get("logit_bias", {}).items():
            logits[int(token)] += bias
        if drawn < params["min_new_tokens"]:
            logits[list(stops)] = -torch.inf
        greedy = params["temperature"] < 1e-6
        scores = (logits if greedy else logits / params["temperature"]).log_softmax(-1)
        top_k = 1 if greedy else params["top_k"]
        kept = scores if top_k == -1 else scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
        return scores, kept.softmax(-1)
