"""`ModelSpec`: the shape of a decoder, converted from and to a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.types import UserError


@dataclass(frozen=True, slots=True)
class Family:
    """How the Hugging Face config of a model family maps to `ModelSpec`."""

    architecture: str  # class of transformers
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the value of `attention_bias`
    out_bias: bool | None = None  # None: the value of `attention_bias`
    head_dim: int | None = None  # default of configs without it; None: hidden_size / num_attention_heads
    fixed: tuple[tuple[str, Any], ...] = ()  # further keys, with the only values that the decoder supports


FAMILIES = {  # by `model_type`
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, out_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
}
SIZES = {  # field of `ModelSpec` -> key of a Hugging Face config
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "max_length": "max_position_embeddings",
}
MAX_SIZE = 1 << 30  # of vocabulary, hidden size, context length or number of layers
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # a key of FAMILIES
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_length: int  # longest supported sequence
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] = ()  # sorted items of Hugging Face's rope parameters, with the type
    norm_eps: float = 1e-6
    tied: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def parameters(self) -> int:
        """Number of weights, computed without building the model."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        attention += (queries + 2 * keys) * self.qkv_bias + self.hidden * self.out_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + mlp + 2 * self.hidden) + self.hidden


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec | None:
    """The spec of a Hugging Face config, or None if `Decoder` does not cover the model."""
    name = str(config.get("model_type", ""))
    family = FAMILIES.get(name)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json: rope_parameters must be an object, not {rope!r:.80}")
    scaling = dict(rope)
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if (
        family is None
        or any(key not in config or config[key] != value for key, value in family.fixed)
        or kind not in ("default", "linear", "llama3")
        or config.get("use_sliding_window")
        or scaling.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0
        or config.get("hidden_act", "silu") != "silu"
        or config.get("quantization_config")
    ):
        return None
    needed = {"default": (), "linear": ("factor",), "llama3": LLAMA3_SCALING}[kind]
    absent = [f"rope_parameters.{key}" for key in needed if key not in scaling]
    optional = ("kv_heads", "head_dim", "max_length")
    absent += [key for field, key in SIZES.items() if field not in optional and config.get(key) is None]
    if absent:
        raise UserError(f"config.json of this {name} model lacks {', '.join(absent)}: fetch the model again")
    heads, hidden = size_of(config, "num_attention_heads"), size_of(config, "hidden_size")
    defaults = dict(zip(optional, (heads, family.head_dim or max(hidden // heads, 1), 2048), strict=True))
    sizes: dict[str, Any] = {field: size_of(config, key, defaults.get(field)) for field, key in SIZES.items()}
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family=name,
        **sizes,
        rope_theta=positive("rope_theta", theta),
        rope_scaling=()
        if kind == "default"
        else (*((key, positive(key, scaling[key])) for key in sorted(needed)), ("rope_type", kind)),
        norm_eps=positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
    )


def size_of(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    return checked_size(default if value is None or (value == 0 and default is not None) else value, key)


def checked_size(value: Any, key: str, where: str = "config.json") -> int:
    """A size from a file; refused if it cannot be a size."""
    if not is_number(value) or value != int(value) or not 1 <= value <= MAX_SIZE:
        raise UserError(f"{where}: {key} must be an integer from 1 to {MAX_SIZE:,}, not {value!r:.80}")
    return int(value)


def positive(key: str, value: Any) -> Any:
    if not is_number(value) or value <= 0:
        raise UserError(f"config.json: {key} must be a number above 0, not {value!r:.80}")
    return float(value) if isinstance(value, float) or key in ("rope_theta", "rms_norm_eps") else value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The content of a config.json that transformers loads as the same model."""
    if spec.family not in FAMILIES:
        raise UserError(f"unknown model family '{spec.family}': choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[spec.family]
    rope = dict(spec.rope_scaling) or {"rope_type": "default"}
    return {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **{key: getattr(spec, field) for field, key in SIZES.items()},
        # transformers 5 reads `rope_parameters`; version 4 and most other tools read the other two.
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
        "rope_theta": spec.rope_theta,
        "rope_scaling": dict(spec.rope_scaling) or None,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.qkv_bias and family.qkv_bias is None,
        "mlp_bias": spec.mlp_bias,
        "hidden_act": "silu",
        "use_cache": True,
        **dict(family.fixed),
    }
