"""SGLang servers that the engine "sglang" starts."""

from __future__ import annotations

from pathlib import Path

import torch

from assay.engine.remote.launch import LaunchedServers, interpreter, plain_environment, visible_devices
from assay.engine.remote.nodes import write_object
from assay.models.base import PolicyModel
from assay.types import UserError

MARGIN = 16  # tokens of the context that SGLang does not use: whole sequences are sent as prompts, to be scored


class LaunchedSGLang(LaunchedServers):
    kind, section = "SGLang", "sglang"

    def _check(self, model: PolicyModel) -> None:
        self.python = interpreter(self.settings, self.section, self.kind)
        if "--config" in self.settings.args:
            raise UserError(
                "sglang.args has --config, and assay starts servers with one: list its settings in sglang.args"
            )

    def _command(self, index: int, port: int, max_length: int) -> list[str]:
        return [self.python, "-m", "sglang.launch_server", *self._arguments(port, max_length)]

    def _arguments(self, port: int, max_length: int) -> list[str]:
        options, settings = self.options, self.settings
        arguments = {
            "config": str(self._write_key()),
            "model-path": str(self.model_folder),
            "served-model-name": "policy",
            "host": self.host,
            "port": str(port),
            "dtype": str(options.dtype).removeprefix("torch."),
            "load-format": "dummy",
            "context-length": str(max_length + MARGIN),
            "max-running-requests": str(options.max_batch),
            "mem-fraction-static": str(settings.gpu_memory),
        }
        if options.prefill_tokens:
            arguments["chunked-prefill-size"] = str(options.prefill_tokens)
        flags = []
        if torch.device(options.device).type == "cuda":
            arguments["cuda-graph-max-bs-decode"] = str(options.max_batch)
            if options.sleep_while_training:
                flags += ["--enable-memory-saver", *(["--enable-weights-cpu-backup"] if settings.keep_weights else [])]
        else:
            arguments["device"] = "cpu"
        if settings.deterministic:
            flags.append("--enable-deterministic-inference")
        return [*(part for name, value in arguments.items() for part in (f"--{name}", value)), *flags, *settings.args]

    def _write_key(self) -> Path:
        """A file that only this user can read: other users can see arguments. The key protects all but /health."""
        path = self.folder / "access.yaml"
        write_object(path, {"api-key": self.key})  # JSON is YAML
        return path

    def _environment(self, index: int) -> dict[str, str]:
        environment = {
            **plain_environment(),
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the margin
            "HF_HUB_OFFLINE": "1",
        }
        return environment | visible_devices(self.settings, torch.device(self.options.device), index)
