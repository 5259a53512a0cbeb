"""`ModelSpec`: the shape of a decoder, converted from and to a Hugging Face config.

transformers' own classes read configs: they know the defaults of each family and all spellings of rope parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.system.model_files import MAX_LAYERS
from assay.types import UserError


@dataclass(frozen=True, slots=True)
class BlockDesign:
    """What the layers of a family have in common, whatever their sizes."""

    # Norms before and after attention, before and after the MLP: their Hugging Face names; "": there is none.
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    norm_offset: float = 0.0  # added to the weights of all norms
    activation: str = "silu"  # of the MLP's gate: a key of ACTIVATIONS
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of the hidden size
    qk_norm_over_heads: bool = False  # norms of queries and keys are over all heads together, not over each one
    fused_qkv: bool = False  # checkpoints have one weight for queries, keys and values,
    fused_gate_up: bool = False  # and one for gate and up
    interleaved_rope: bool = False  # rotary pairs are neighbors, not half of the rotated part apart


@dataclass(frozen=True, slots=True)
class Family:
    """How the Hugging Face config of a model family maps to `ModelSpec`."""

    architecture: str  # class of transformers
    design: BlockDesign = BlockDesign()
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the value of `attention_bias`
    out_bias: bool | None = None  # None: the value of `attention_bias`
    partial_rotary: bool = False  # the config has `partial_rotary_factor`
    windows: str = ""  # layers to which `sliding_window` applies: "all", or "some" (by `layer_types`)
    local_rope_theta: float = 0.0  # layers with a window have their own RoPE base; usually this
    query_scalar: bool = False  # the config has `query_pre_attn_scalar`
    no_rope: bool = False  # the config has `no_rope_layers`
    activation_key: str = "hidden_act"
    fixed: tuple[tuple[str, Any], ...] = ()  # further keys, with the only values that the decoder supports


ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # our names -> those of configs
FAMILIES = {  # by `model_type`
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, out_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, out_bias=False, windows="all"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        BlockDesign(
            norms=(
                *("input_layernorm", "post_attention_layernorm"),
                *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            ),
            norm_offset=1.0,
            activation="gelu_tanh",
            scaled_embedding=True,
        ),
        qk_norm=True,
        windows="some",
        local_rope_theta=10_000.0,
        query_scalar=True,
        activation_key="hidden_activation",
        fixed=(
            ("attn_logit_softcapping", None),
            ("final_logit_softcapping", None),
            ("use_bidirectional_attention", False),
        ),
    ),
    "smollm3": Family("SmolLM3ForCausalLM", no_rope=True),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        BlockDesign(norms=("", "post_attention_layernorm", "", "post_feedforward_layernorm"), qk_norm_over_heads=True),
        qk_norm=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        BlockDesign(fused_qkv=True, fused_gate_up=True),
        qkv_bias=False,
        out_bias=False,
        partial_rotary=True,
        windows="all",
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        BlockDesign(
            norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
            fused_gate_up=True,
            interleaved_rope=True,
        ),
        out_bias=False,
        partial_rotary=True,
    ),
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
MAX_SIZE = 1 << 30  # of vocabulary, hidden size or context length
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_KEYS: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": LLAMA3_SCALING}
FULL, SLIDING = "full_attention", "sliding_attention"  # values of `layer_types`


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
    windows: tuple[int, ...] = ()  # by layer, how many tokens a token sees, itself included (0: all); (): all layers 0
    local_rope_theta: float = 0.0  # RoPE base of layers with a window; 0: as all others, which is without scaling
    no_rope: tuple[int, ...] = ()  # layers without rotary embedding
    rotary: int = 0  # leading dimensions of a head that are rotated; 0: all
    query_scalar: int = 0  # attention scores are divided by its square root; 0: the same as `head_dim`

    @property
    def design(self) -> BlockDesign:
        return FAMILIES[self.family].design

    @property
    def rotated(self) -> int:
        """Number of leading dimensions of a head that are rotated."""
        return self.rotary or self.head_dim

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention's scores; None: the usual one, 1 / sqrt(head_dim)."""
        return self.query_scalar**-0.5 if self.query_scalar else None

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_table(self, layer: int) -> int:
        """Which of the tables of `decoder.rope_tables` the layer uses: the general one, the local one, no rotation."""
        local = bool(self.local_rope_theta)
        if layer in self.no_rope:
            return 1 + local
        return int(local and self.window(layer) > 0)

    @property
    def parameters(self) -> int:
        """Number of weights, computed without building the model."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys)
        attention += (queries + 2 * keys) * self.qkv_bias + self.hidden * self.out_bias
        attention += (queries + keys if self.design.qk_norm_over_heads else 2 * self.head_dim) * self.qk_norm
        mlp = 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden * (1 if self.tied else 2)
        norms = sum(bool(name) for name in self.design.norms)
        return embeddings + self.layers * (attention + mlp + norms * self.hidden) + self.hidden


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec | None:
    """The spec of a Hugging Face config, or None if `Decoder` does not cover the model."""
    name = str(config.get("model_type", ""))
    family = FAMILIES.get(name)
    if family is None or config.get("quantization_config"):
        return None
    required = [key for field, key in SIZES.items() if field not in ("kv_heads", "head_dim", "max_length")]
    if absent := [key for key in required if config.get(key) is None]:
        raise UserError(f"config.json of this {name} model lacks {', '.join(absent)}: fetch the model again")
    for key in required:  # before lists with an entry per layer are made
        checked_size(config[key], key)
    complete = with_defaults(config, name)
    get = complete.get
    rope = read_rope(complete, family)
    if (
        rope is None
        or any(get(key, value) != value for key, value in family.fixed)
        or get("use_sliding_window")
        or get(family.activation_key) not in (None, ACTIVATIONS[family.design.activation])
    ):
        return None
    complete["head_dim"] = get("head_dim") or max(complete["hidden_size"] // complete["num_attention_heads"], 1)
    sizes: dict[str, Any] = {field: checked_size(get(key), key) for field, key in SIZES.items()}
    if sizes["heads"] % sizes["kv_heads"]:
        counts = f"num_attention_heads = {sizes['heads']} is no multiple of num_key_value_heads = {sizes['kv_heads']}"
        raise UserError(f"config.json of this {name} model: {counts}: fetch the model again")
    rotary = int(sizes["head_dim"] * rope.pop("partial"))
    windows = windows_of(complete, family, sizes["layers"])
    if windows is None or rotary % 2 or not 0 < rotary <= sizes["head_dim"]:
        return None
    bias = bool(get("attention_bias", False))
    scalar = checked_size(get("query_pre_attn_scalar"), "query_pre_attn_scalar") if family.query_scalar else 0
    uses_rope = (
        complete["no_rope_layers"] if family.no_rope else []
    )  # despite its name: 1 for a layer with rotary embedding
    return ModelSpec(
        family=name,
        **sizes,
        **rope,
        norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        tied=bool(get("tie_word_embeddings")),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=windows,
        no_rope=tuple(layer for layer, use in enumerate(uses_rope) if not use),
        rotary=0 if rotary == sizes["head_dim"] else rotary,
        query_scalar=0 if scalar == sizes["head_dim"] else scalar,
    )


def with_defaults(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config of the family `name` as transformers reads it."""
    from transformers import AutoConfig  # late: the import takes seconds

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the family's may be outside a vocabulary
    given = {key: value for key, value in config.items() if key != "model_type"}
    try:
        return vars(AutoConfig.for_model(name, **copy.deepcopy(given) | tokens))
    except Exception as error:  # values of wrong types make it fail in any way
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"config.json of this {name} model is not valid ({reason}): correct it, or fetch the model again"
        ) from error


def read_rope(config: Mapping[str, Any], family: Family) -> dict[str, Any] | None:
    """Fields of `ModelSpec`, and the rotated part of a head as `partial`; None for a scaling that is not supported."""
    general, local = config["rope_parameters"], {"rope_type": "default", "rope_theta": 0.0}
    if family.local_rope_theta:
        general, local = general[FULL], general[SLIDING]
    kind, part = general["rope_type"], general.get("partial_rotary_factor") or 1.0
    if kind not in ROPE_KEYS or local["rope_type"] != "default" or (part != 1.0 and not family.partial_rotary):
        return None
    items = ((key, positive(key, general[key])) for key in sorted(ROPE_KEYS[kind]))
    return {
        "rope_theta": positive("rope_theta", general["rope_theta"]),
        "rope_scaling": () if kind == "default" else (*items, ("rope_type", kind)),
        "local_rope_theta": positive("rope_theta", local["rope_theta"]) if family.local_rope_theta else 0.0,
        "partial": positive("partial_rotary_factor", part),
    }


def windows_of(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...] | None:
    """The sliding window of each layer; None if a layer has another kind of attention."""
    if not family.windows or config["sliding_window"] is None:
        return ()
    window = checked_size(config["sliding_window"], "sliding_window")
    if family.windows == "all":
        return (window,) * layers
    kinds = config["layer_types"]
    if not set(kinds) <= {FULL, SLIDING}:
        return None
    return tuple(window * (kind == SLIDING) for kind in kinds) if SLIDING in kinds else ()


def checked_size(value: Any, key: str, where: str = "config.json") -> int:
    """A size from a file; refused if it cannot be a size."""
    largest = MAX_LAYERS if key in ("num_hidden_layers", "block_count") else MAX_SIZE
    if not is_number(value) or value != int(value) or not 1 <= value <= largest:
        raise UserError(f"{where}: {key} must be an integer from 1 to {largest:,}, not {value!r:.80}")
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
    rope = {**(dict(spec.rope_scaling) or {"rope_type": "default"}), "rope_theta": spec.rope_theta}
    config = {
        "architectures": [family.architecture],
        "model_type": spec.family,
        **{key: getattr(spec, field) for field, key in SIZES.items()},
        # transformers 5 reads `rope_parameters`; version 4 and most other tools read the other two.
        "rope_parameters": rope,
        "rope_theta": spec.rope_theta,
        "rope_scaling": dict(spec.rope_scaling) or None,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.qkv_bias and family.qkv_bias is None,
        "mlp_bias": spec.mlp_bias,
        family.activation_key: ACTIVATIONS[family.design.activation],
        "use_cache": True,
        **dict(family.fixed),
    }
    if family.partial_rotary:
        factor = spec.rotated / spec.head_dim
        if int(spec.head_dim * factor) < spec.rotated:  # a quotient that was rounded down
            factor = math.nextafter(factor, 1.0)
        rope["partial_rotary_factor"] = config["partial_rotary_factor"] = factor
    if family.windows:
        config["sliding_window"] = max(spec.windows, default=0) or None
    if family.windows == "some":
        config["sliding_window"] = config["sliding_window"] or spec.max_length
        config["layer_types"] = [SLIDING if spec.window(layer) else FULL for layer in range(spec.layers)]
    if family.local_rope_theta:
        local = {"rope_type": "default", "rope_theta": spec.local_rope_theta}
        config |= {"rope_parameters": {FULL: rope, SLIDING: local}, "rope_local_base_freq": spec.local_rope_theta}
    if family.query_scalar:
        config["query_pre_attn_scalar"] = spec.query_scalar or spec.head_dim
    if family.no_rope:
        config["no_rope_layers"] = [int(layer not in spec.no_rope) for layer in range(spec.layers)]
    return config
