"""What runs inside vLLM servers: an extension of the worker, and access control.

The extension loads weights from a folder or from the trainer's GPU memory, and computes digests. Its methods are called
through the server's endpoint /collective_rpc. vLLM's own API key protects /v1 only, not the endpoints that replace
weights: `KeyCheck` protects all of them.

vLLM runs in its own environment. `stage` copies the modules that it needs into a folder for PYTHONPATH, so
that vLLM finds them without the rest of this package; `python -m assay.integrations.vllm_worker FOLDER` does it for
servers that are started by hand.
"""

from __future__ import annotations

import hmac
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.engine.remote.server_side import KEY, gpu_of, shared_buffer, weights_of_buffer, weights_of_folder
from assay.models.fingerprint import digests

MODULE = "assay.integrations.vllm_worker"  # `__name__` differs if it is run as a program
EXTENSION, MIDDLEWARE = f"{MODULE}.AssayWorker", f"{MODULE}.KeyCheck"


class KeyCheck:
    """ASGI middleware: every request must have the key, also those for metrics and health."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._is_valid(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_valid(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)


class AssayWorker:
    """Methods that vLLM adds to its worker class. Weights have their Hugging Face names."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device

    def assay_load_folder(self, folder: str) -> None:
        """Load all safetensors files of a folder."""
        with self._assay_config():
            self.model_runner.reload_weights(weights_iterator=weights_of_folder(Path(folder)))
            refresh_tied_head(self.model_runner.get_model())

    def assay_load_shared(self, chunk: Mapping[str, Any], first: bool) -> None:
        """Load weights from a buffer of another process on the same GPU (see `transport.IpcTransport`).

        After the last buffer, `assay_finish_loading` must be called.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        with self._assay_config():
            if first:
                initialize_layerwise_reload(model)
            model.load_weights(weights_of_buffer(shared_buffer(chunk["handle"], self.device), chunk))
        torch.cuda.synchronize()  # the trainer overwrites the buffer afterwards

    def assay_finish_loading(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._assay_config():
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
            refresh_tied_head(self.model_runner.get_model())
        torch.cuda.synchronize()

    def assay_digests(self) -> dict[str, str] | None:
        """Digest of each weight by its Hugging Face name; None if weights are split over GPUs or repacked."""
        parallel = self.vllm_config.parallel_config
        if parallel.world_size > 1 or self.model_config.quantization is not None:
            return None
        weights = dict(unfused(self.model_runner.get_model()))
        if any(weight is None or not weight.numel() for weight in weights.values()):
            return None
        return digests((name, weight) for name, weight in weights.items() if weight is not None)

    def assay_gpu(self) -> dict[str, str]:
        """The physical GPU of this worker."""
        return {"uuid": gpu_of(self.device)}

    @contextmanager
    def _assay_config(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            yield


def refresh_tied_head(model: nn.Module) -> None:
    """Pack a head that is tied to the embedding again: vLLM reloads only the embedding.

    Without it, on a CPU, logits would be computed with the head of the first weights.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)


def unfused(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Weights by their Hugging Face names: fused layers are split, padding of the vocabulary is removed.

    None for a layer whose weight does not have the expected shape, because it was repacked for the kernels of a CPU.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    for name, weight in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        parent, _, layer = owner.rpartition(".")
        module = modules[owner]
        sizes = getattr(module, "output_sizes", None)
        if layer in packed and sizes is not None and len(sizes) == len(packed[layer]):
            names = [f"{parent}.{part}.{kind}" for part in packed[layer]]
            complete = weight.dim() > 0 and weight.shape[0] == sum(sizes)
            yield from zip(names, weight.split(list(sizes)) if complete else [None] * len(names), strict=True)
        elif (vocabulary := getattr(module, "org_vocab_size", None)) is not None:
            yield name, weight[:vocabulary]
        else:
            yield name, weight


STAGED = ("engine/remote/server_side.py", "integrations/vllm_worker.py", "models/fingerprint.py")


def stage(folder: Path) -> None:
    """Copy the modules that vLLM's process imports into `folder`, as a package of the same name."""
    root = Path(__file__).resolve().parents[1]
    for name in STAGED:
        target = folder / "assay" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, target)
        for package in list(target.parents)[: len(Path(name).parts)]:
            (package / "__init__.py").touch()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m assay.integrations.vllm_worker FOLDER")
    stage(Path(sys.argv[1]))
    print(f"start vLLM with PYTHONPATH={Path(sys.argv[1]).resolve()} and --worker-extension-cls {EXTENSION}")


if __name__ == "__main__":
    main()
