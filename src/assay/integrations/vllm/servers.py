"""vLLM servers that the engine "vllm" starts."""

from __future__ import annotations

import json
import os

import torch

from assay.engine.remote.launch import LaunchedServers, interpreter, plain_environment, visible_devices
from assay.engine.remote.server_side import KEY
from assay.integrations.vllm.access import MIDDLEWARE
from assay.integrations.vllm.worker import EXTENSION, stage
from assay.models.base import PolicyModel


class LaunchedVLLM(LaunchedServers):
    kind, section = "vLLM", "vllm"

    def _check(self, model: PolicyModel) -> None:
        self.python = interpreter(self.settings, self.section, self.kind)
        stage(self.folder / "packages")

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *self._arguments(port, max_length)]

    def _arguments(self, port: int, max_length: int) -> list[str]:
        options, settings = self.options, self.settings
        arguments = {
            "model": str(self.model_folder),
            "served-model-name": "policy",
            "host": self.host,
            "port": str(port),
            "dtype": str(options.dtype).removeprefix("torch."),
            "load-format": "dummy",
            "max-model-len": str(max_length + 1),  # `score` gets whole sequences as prompts
            "max-num-seqs": str(options.max_batch),
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "worker-extension-cls": EXTENSION,
            "middleware": MIDDLEWARE,
        }
        flags = []
        if torch.device(options.device).type == "cuda":
            arguments["gpu-memory-utilization"] = str(settings.gpu_memory)
            if options.kv_cache_gib:
                arguments["kv-cache-memory-bytes"] = str(int(options.kv_cache_gib * 2**30))
            if options.sleep_while_training:
                flags.append("--enable-sleep-mode")
        else:
            flags.append("--enforce-eager")
        if settings.transport == "nccl":
            arguments["weight-transfer-config"] = json.dumps({"backend": "nccl"})
        return [*(part for name, value in arguments.items() for part in (f"--{name}", value)), *flags, *settings.args]

    def _environment(self, index: int) -> dict[str, str]:
        options = self.options
        device = torch.device(options.device)
        packages = os.pathsep.join(filter(None, (str(self.folder / "packages"), os.environ.get("PYTHONPATH"))))
        environment = {
            **plain_environment(),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": packages,
            KEY: self.key,
        }
        environment |= visible_devices(self.settings, device, index)
        if device.type == "cpu" and not self.settings.devices:
            if self.nodes is None:  # engine nodes may have other cores
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(options.kv_cache_gib))))
        return environment
