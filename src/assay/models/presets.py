"""Small models built from scratch, so that a run needs no download."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

import torch

from assay.models.decoder import Decoder
from assay.models.spec import FAMILIES, ModelSpec
from assay.types import UserError


def shape(family: str, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> ModelSpec:
    """A spec whose vocabulary and length are still open."""
    return ModelSpec(
        family=family,
        vocab_size=0,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        max_length=0,
        qk_norm=FAMILIES[family].qk_norm,
    )


# Weights without the embedding, which adds vocabulary x hidden.
PRESETS: dict[str, ModelSpec] = {
    "nano": shape("qwen3", hidden=64, layers=4, heads=4, kv_heads=2, intermediate=256),  # 0.25M
    "tiny": shape("qwen3", hidden=128, layers=4, heads=4, kv_heads=4, intermediate=384),  # 0.85M
    "tiny-llama": shape("llama", hidden=128, layers=4, heads=4, kv_heads=4, intermediate=384),  # 0.85M
    "small": shape("qwen3", hidden=256, layers=5, heads=8, kv_heads=8, intermediate=704),  # 4.0M
    "base": shape("qwen3", hidden=384, layers=7, heads=6, kv_heads=6, intermediate=1024),  # 12.4M
    "medium": shape("qwen3", hidden=512, layers=9, heads=8, kv_heads=8, intermediate=1408),  # 28.9M
}


def preset(name: str, vocab_size: int, max_length: int) -> ModelSpec:
    """The spec of a preset for a given vocabulary and longest sequence."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(f"unknown model preset '{name}': {hint}choose one of {', '.join(PRESETS)}")
    if vocab_size < 1 or max_length < 1:
        raise UserError(
            f"preset '{name}' needs a vocabulary and a length of at least 1, not {vocab_size} and {max_length}"
        )
    return replace(PRESETS[name], vocab_size=vocab_size, max_length=max_length)


def build_preset(name: str, vocab_size: int, max_length: int, seed: int) -> Decoder:
    """A preset with fresh weights, the same for the same seed."""
    spec = preset(name, vocab_size, max_length)
    with torch.device("meta"):  # the layers' own random initialisation would be thrown away
        model = Decoder(spec)
    model.to_empty(device="cpu")
    model.initialise(seed)
    return model
