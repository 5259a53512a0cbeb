"""vLLM servers that the engine starts, supervises and stops."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from assay.config import VLLMConfig
from assay.engine.base import EngineOptions
from assay.engine.vllm_worker import EXTENSION, stage
from assay.models.base import PolicyModel
from assay.models.export import save_config
from assay.process.program import SupervisedProgram, free_port
from assay.types import UserError

POLL_S = 0.2  # between two questions whether a server has started

SaveTokenizer = Callable[[Path], object]  # writes the tokenizer into a folder


class LaunchedServers:
    """vLLM servers on this host that belong to this process. They end with it."""

    def __init__(self, settings: VLLMConfig, options: EngineOptions) -> None:
        self.settings, self.options = settings, options
        self.folder = Path(tempfile.mkdtemp(prefix="assay-vllm-"))
        self.programs: dict[str, SupervisedProgram] = {}  # by URL
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, True)

    @property
    def urls(self) -> list[str]:
        return list(self.programs)

    def start(self, model: PolicyModel, save_tokenizer: SaveTokenizer | None) -> None:
        """Start all servers, with random weights: the first update replaces them. Returns when they are ready."""
        python = self._interpreter()
        assert save_tokenizer is not None, "the engine needs the tokenizer to start servers"
        stage(self.folder / "packages")
        model_folder = self.folder / "model"
        model_folder.mkdir()
        save_config(model, model_folder, self.options.dtype)
        save_tokenizer(model_folder)
        max_length = min(model.max_length, self.options.max_length or model.max_length)
        for index in range(self.settings.servers):
            port = self.settings.port + index if self.settings.port else free_port()
            command = [python, "-m", "vllm.entrypoints.openai.api_server", *self._arguments(port, max_length)]
            log = self.folder / f"server-{index}.log"
            self.programs[f"http://127.0.0.1:{port}"] = SupervisedProgram(command, log, self._environment(index))
        for url in self.programs:
            self._wait(url)

    def _interpreter(self) -> str:
        if not self.settings.python:
            spec = importlib.util.find_spec("vllm")
            if spec is None or spec.origin is None:  # no origin: a folder of this name that is not a package
                raise UserError(
                    "vLLM is not installed in this environment: set vllm.python to the interpreter of an environment "
                    "that has it, or vllm.urls to running servers"
                )
            return sys.executable
        found = shutil.which(os.path.expanduser(self.settings.python))
        if found is None:
            raise UserError(f"vllm.python = '{self.settings.python}' is not a program: give the path of an interpreter")
        return found

    def _arguments(self, port: int, max_length: int) -> list[str]:
        options, settings = self.options, self.settings
        arguments = {
            "model": str(self.folder / "model"),
            "served-model-name": "policy",
            "host": "127.0.0.1",
            "port": str(port),
            "dtype": str(options.dtype).removeprefix("torch."),
            "load-format": "dummy",
            "max-model-len": str(max_length + 1),  # `score` gets whole sequences as prompts
            "max-num-seqs": str(options.max_batch),
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "worker-extension-cls": EXTENSION,
        }
        flags = []
        if torch.device(options.device).type == "cuda":
            arguments["gpu-memory-utilization"] = str(settings.gpu_memory)
            if options.memory:
                arguments["kv-cache-memory-bytes"] = str(int(options.memory * 2**30))
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
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": packages,
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # of torchrun
        for name in [name for name in environment if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))]:
            del environment[name]
        if self.settings.devices:
            environment["CUDA_VISIBLE_DEVICES"] = self.settings.devices[index % len(self.settings.devices)]
        elif device.type == "cuda" and device.index:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = visible[device.index] if visible[0] else str(device.index)
        elif device.type == "cpu":
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(options.memory))))
        return environment

    def _wait(self, url: str) -> None:
        """Wait until a server is ready."""
        import httpx

        deadline = time.monotonic() + self.settings.start_timeout_s
        with httpx.Client(trust_env=False, timeout=5) as client:
            while True:
                if death := self.death(url):
                    raise UserError(f"a vLLM server did not start: {death}")
                try:
                    if client.get(f"{url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    limit, log = self.settings.start_timeout_s, self._kept_log(url)
                    raise UserError(
                        f"a vLLM server was not ready after {limit:g} s (last line of {log}: "
                        f"{self.programs[url].tail()}): raise vllm.start_timeout_s"
                    )
                time.sleep(POLL_S)

    def death(self, url: str) -> str:
        """How a server ended, with the last error in its log; empty while it runs."""
        program = self.programs.get(url)
        if program is None or program.ended is None:
            return ""
        return f"it ended ({program.ended}): {program.tail()} (see {self._kept_log(url)})"

    def hint(self, url: str) -> str:
        """The last error in the log of a server, and where the log is."""
        return f"; {self.programs[url].tail()} (see {self._kept_log(url)})" if url in self.programs else ""

    def _kept_log(self, url: str) -> Path:
        """The log, whose folder is not removed any more."""
        self._remove.detach()
        return self.programs[url].log

    def close(self) -> None:
        for program in self.programs.values():
            program.close()
        self.programs = {}
        self._remove()
