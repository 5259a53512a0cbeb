"""Models to measure: known shapes with random weights, or any model that loads."""

from __future__ import annotations

from pathlib import Path

import torch

from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.load import load_model
from assay.models.presets import preset
from assay.models.spec import ModelSpec


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, vocab_size: int) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        intermediate=intermediate,
        max_length=32768,
        rope_theta=1e6,
        tied=True,
        qkv_bias=True,
    )


SHAPES: dict[str, ModelSpec] = {
    "0.5b": qwen2(896, 4864, layers=24, heads=14, head_dim=64, vocab_size=151936),  # Qwen2.5 0.5B
    "1.5b": qwen2(1536, 8960, layers=28, heads=12, head_dim=128, vocab_size=151936),  # Qwen2.5 1.5B
    "tiny": qwen2(64, 128, layers=2, heads=4, head_dim=16, vocab_size=512),  # to try the command itself
    "tiny-llama": preset("tiny-llama", vocab_size=512, max_length=2048),  # the step that a CPU is measured with
}


def float32_model(shape: str, source: str | None, device: torch.device, seed: int) -> PolicyModel:
    """As a trainer holds it: an engine makes its own copy, in its own dtype."""
    if source is not None:
        return load_model(source, device=device, dtype=torch.float32)
    return random_model(SHAPES[shape], device, seed)


@torch.no_grad()
def random_model(spec: ModelSpec, device: torch.device, seed: int) -> Decoder:
    """Norms are ones and all else is normal, drawn on the device itself."""
    with torch.device("meta"):
        model = Decoder(spec)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02, generator=generator)
    return model


def label(shape: str, source: str | None) -> str:
    """What ids of rows call the model."""
    if source is None:
        return shape
    path = Path(source)
    return (path.stem if path.suffix == ".gguf" else path.resolve().name if path.exists() else path.name).lower()
