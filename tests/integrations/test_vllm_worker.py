"""The extension of vLLM's worker, without vLLM: staging, names of fused layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from engine_parts import small_decoder, small_spec
from torch import nn

from assay.integrations.vllm.worker import stage, unfused

WORKER = "assay.integrations.vllm.worker"
POLICY = small_decoder(small_spec("qwen2"))


class Fused(nn.Module):
    """A layer with the attributes of vLLM's."""

    def __init__(self, *parts: torch.Tensor, **attributes: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat(parts), requires_grad=False)
        self.__dict__.update(attributes)


def test_staged_modules_can_be_imported_without_the_rest_of_the_package(tmp_path: Path) -> None:
    stage(tmp_path)
    code = (
        f"import sys; from {WORKER} import AssayWorker, EXTENSION; import assay; print(EXTENSION); "
        f"assert not [m for m in sys.modules if m.startswith('assay.') and not '{WORKER}'.startswith(m) "
        "and not 'assay.engine.remote.server_side'.startswith(m) "
        "and m not in ('assay.models', 'assay.models.fingerprint')]; "
        "print(assay.__path__[0])"
    )
    shown = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert shown.stdout.decode().split() == [f"{WORKER}.AssayWorker", str(tmp_path / "assay")]


def test_fused_layers_are_split_and_padding_is_removed() -> None:
    parts = [torch.randn(n, 4) for n in (4, 2, 2, 6, 6)]
    model = nn.Module()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    model.attn, model.mlp = nn.Module(), nn.Module()
    model.attn.qkv_proj = Fused(*parts[:3], output_sizes=[4, 2, 2])
    model.mlp.gate_up_proj = Fused(*parts[3:], output_sizes=[6, 6])
    model.embed_tokens = Fused(torch.ones(8, 4), org_vocab_size=5)
    model.norm = nn.LayerNorm(4, bias=False)
    weights = dict(unfused(model))
    names = ["attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    for name, part in zip(names, parts, strict=True):
        weight = weights.pop(f"{name}.weight")
        assert weight is not None and torch.equal(weight, part)
    assert {name: tuple(weight.shape) for name, weight in weights.items() if weight is not None} == {
        "embed_tokens.weight": (5, 4),
        "norm.weight": (4,),
    }
    model.attn.qkv_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # repacked for a CPU
    assert dict(unfused(model))["attn.k_proj.weight"] is None
