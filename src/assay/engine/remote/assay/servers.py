"""`assay serve` processes that the engine "assay" starts."""

from __future__ import annotations

import os
import sys

import torch

from assay.engine.remote.launch import LaunchedServers, plain_environment
from assay.engine.remote.server_side import KEY
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.types import UserError


class LaunchedAssay(LaunchedServers):
    kind, section = "assay", "server"

    def _check(self, model: PolicyModel) -> None:
        if not isinstance(model, Decoder):
            raise UserError("servers for this model must be started by hand: set server.urls, or engine.name = 'hf'")

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        options, devices = self.options, self.settings.devices
        device = torch.device(options.device).type if self.nodes else str(options.device)  # a node has its own GPUs
        values = {
            "http.host": self.host,
            "http.port": port,
            "http.name": "policy",
            "http.api_key_env": KEY,
            "http.allow_updates": "true",
            "http.max_body_mb": 256,
            "http.frontends": 0,
            "http.queue": 1_000_000,  # the run adds only what it needs
            "prompt.style": "raw",
            "device": devices[index % len(devices)] if devices else device,
            "threads": torch.get_num_threads(),
            "model.max_length": max_length,
            "engine.dtype": str(options.dtype).removeprefix("torch."),
            "engine.max_batch": options.max_batch,
            "engine.kv_cache_gib": options.kv_cache_gib,
            "engine.prefill_tokens": options.prefill_tokens,
            "engine.sleep_while_training": str(options.sleep_while_training).lower(),
            "engine.kv_on_update": options.kv_on_update,
        }
        words = [f"--{name}={value}" for name, value in values.items()]
        return [sys.executable, "-m", "assay", "serve", str(self.model_folder), *words]

    def _environment(self, index: int) -> dict[str, str]:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        return {**plain_environment(), "PYTHONPATH": path, KEY: self.key}
