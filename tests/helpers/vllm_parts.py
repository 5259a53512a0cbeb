"""A stand-in for a vLLM server, with the answers of the real one (0.32) and a small model, for quick tests."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from http_parts import Answer
from safetensors.torch import load_file

from assay.integrations.vllm_worker import EXTENSION
from assay.models.decoder import Decoder
from assay.models.fingerprint import digests


class FakeVLLM:
    """Call it with a path and a body. Samples one token at a time, so that a pause can interrupt."""

    def __init__(self, model: Decoder, decode: Any, **changes: Any) -> None:
        self.model, self.decode = copy.deepcopy(model), decode
        self.max_length, self.extension, self.logprobs_mode, self.dtype = 97, EXTENSION, "processed_logprobs", "float32"
        self.development, self.sleep_mode, self.token_s, self.device = True, False, 0.0, "cuda"
        self.__dict__.update(changes)
        self.paused = self.sleeping = False
        self.awake, self.running = threading.Condition(), 0
        self.calls: list[str] = []

    def __call__(self, path: str, body: Any) -> Answer:
        self.calls.append(path)
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        match url.path:
            case "/health":
                return 200, b""
            case "/v1/models":
                return 200, {"data": [{"id": "policy", "max_model_len": self.max_length, "parent": None}]}
            case "/v1/completions":
                return self.complete(body)
            case _ if not self.development:
                return 404, {"detail": "Not Found"}
            case "/server_info":
                return 200, {"vllm_config": self.config()}
            case "/collective_rpc":
                return self.rpc(body["method"], **body.get("kwargs", {}))
            case "/pause" | "/resume":
                with self.awake:
                    self.paused = url.path == "/pause"
                    self.awake.notify_all()
                    self.awake.wait_for(lambda: not (self.paused and self.running), timeout=30)
                return 200, {"status": query.get("mode", "")}
            case "/sleep" | "/wake_up":
                self.sleeping = url.path == "/sleep"
                return 200, {}
            case "/is_sleeping":
                return 200, {"is_sleeping": self.sleeping}
            case "/reset_prefix_cache":
                return 200, {"success": True}
        return 404, {"detail": "Not Found"}

    def config(self) -> dict[str, Any]:
        model = {"logprobs_mode": self.logprobs_mode, "dtype": f"torch.{self.dtype}"}
        model |= {"enable_sleep_mode": self.sleep_mode}
        parallel = {"tensor_parallel_size": 1, "worker_extension_cls": self.extension}
        return {"model_config": model, "device_config": {"device": self.device}, "parallel_config": parallel}

    @torch.no_grad()
    def rpc(self, method: str, **arguments: Any) -> Answer:
        if method in ("assay_load_folder", "reload_weights"):
            folder = Path(arguments["folder" if method == "assay_load_folder" else "weights_path"])
            targets = dict(self.model.weights())
            for file in sorted(folder.glob("*.safetensors")):
                for name, weight in load_file(file).items():
                    if targets[name].shape != weight.shape:
                        return 500, {"error": {"message": f"size mismatch for {name}"}}
                    targets[name].copy_(weight)
            return 200, {"results": [None]}
        if method == "assay_digests":
            return 200, {"results": [digests(self.model.weights())]}
        return 500, {"error": {"message": f"no method {method}"}}

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model.unembed(self.model.hidden(torch.tensor(ids), [len(ids)])).double()

    def complete(self, body: dict[str, Any]) -> Answer:
        prompt: list[int] = body["prompt"]
        if max(prompt) >= self.model.vocab_size:
            return 400, {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}}
        if body.get("model") != "policy":
            return 404, {"error": {"message": f"The model `{body.get('model')}` does not exist."}}
        if not 0 <= body.get("temperature", 1.0) <= 2:
            return 400, {"error": {"message": "temperature must be in [0, 2]"}}
        with self.awake:
            self.awake.wait_for(lambda: not self.paused, timeout=30)
            self.running += 1
        try:
            choice = self.sample(prompt, body)
        finally:
            with self.awake:
                self.running -= 1
                self.awake.notify_all()
        if "prompt_logprobs" in body:
            rows = self.logits(prompt).log_softmax(-1)
            given = [{str(t): {"logprob": float(rows[i, t])}} for i, t in enumerate(prompt[1:])]
            choice["prompt_logprobs"] = [None, *given]
        return 200, {"choices": [choice]}

    def sample(self, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        ids: list[int] = []
        logprobs: list[float] = []
        generator = torch.Generator().manual_seed(body["seed"] if "seed" in body else torch.seed() % 2**62)
        reason = "length"
        while len(ids) < body["max_tokens"]:
            if self.paused:
                reason = "abort"
                break
            time.sleep(self.token_s)
            row = self.processed([*prompt, *ids], len(ids), body)
            greedy = not body.get("temperature", 1.0)
            token = int(row.argmax() if greedy else torch.multinomial(row.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(row[token]))
            if token in body.get("stop_token_ids", ()) or any(s in self.decode(ids) for s in body.get("stop", ())):
                reason = "stop"
                break
        return {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}

    def processed(self, ids: list[int], drawn: int, body: dict[str, Any]) -> torch.Tensor:
        """Log-probabilities after bias, minimum length, temperature and truncation, in this order."""
        logits = self.logits(ids)[-1] / (body.get("temperature", 1.0) or 1.0)
        for token, bias in body.get("logit_bias", {}).items():
            logits[int(token)] += bias
        if drawn < body.get("min_tokens", 0):
            logits[body["stop_token_ids"]] = -torch.inf
        if top_k := body.get("top_k"):
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        return logits.log_softmax(-1)
