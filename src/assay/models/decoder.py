"""The decoder of the Llama, Qwen2 and Qwen3 families that the trainer computes with.

The same architecture has three forward passes: this one, with gradients, for training and scoring; the fused network of
the native engine (`engine.native.network`); and C code for decoding small models on a CPU (`engine.native.compiled`).
Tests check that they agree. All three read the weights under the same names.

Submodules have Hugging Face's names, so the state dict is the checkpoint format. Tokens are packed: every tensor is
[N, ...] over the tokens of all sequences. Only the `attend` callable knows where sequences begin and end.

`WeightLoader` fills a decoder one weight at a time, so that loading needs little memory beyond the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.models.attention import PackedCausal
from assay.models.base import LoadReport, PolicyModel, autocast_dtype
from assay.models.spec import LLAMA3_SCALING, ModelSpec
from assay.types import UserError

# (queries [N, heads, d], keys [N, kv_heads, d], values [N, kv_heads, d]) -> [N, heads, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast x is bfloat16 and the weight float32: the fused kernel wants one dtype.
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden, queries, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden, keys, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden, keys, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(queries, spec.hidden, bias=spec.out_bias)
        self.q_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [N, heads, d]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = Mlp(spec)
        self.input_layernorm = Norm(spec.hidden, spec.norm_eps)
        self.post_attention_layernorm = Norm(spec.hidden, spec.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.post_attention(x, attend(*self.pre_attention(x, cos, sin)))

    def pre_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn(self.input_layernorm(x), cos, sin)

    def post_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = Norm(spec.hidden, spec.norm_eps)


class Decoder(PolicyModel):
    inv_freq: Tensor
    supports_prefix_sharing = True
    recompute = False  # activation checkpointing: store only the inputs of layers; less memory, a third more time
    compiled_bridge: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None  # see `compile_layers`

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vocab_size, self.max_length = spec.vocab_size, spec.max_length
        self.model = Trunk(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab_size, bias=False)
        if spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("inv_freq", rope_frequencies(spec).to(torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Move or cast without rounding the rotary frequencies or separating a tied head (as `to_empty` would)."""
        super()._apply(fn, recurse)
        self.inv_freq = rope_frequencies(self.spec).to(self.inv_freq.device)
        if self.spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, D] for token ids [N] at positions [N]."""
        x = self.model.embed_tokens(ids)
        x = x.to(autocast_dtype(x))  # the residual stream has this dtype too, as in an engine
        angles = positions[:, None].float() * self.inv_freq.float()  # [N, d/2]
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)  # [N, 1, d/2]
        if self.recompute and torch.is_grad_enabled():
            for layer in self.model.layers:
                x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
        elif self.compiled_bridge is not None:
            x = self._forward_bridged(x, cos, sin, attend)
        else:
            for layer in self.model.layers:
                x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def _forward_bridged(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The layers, with everything between two attention operations as one compiled call."""
        assert self.compiled_bridge is not None
        layers: list[Layer] = list(self.model.layers)  # type: ignore[arg-type]
        q, k, v = Layer.pre_attention(layers[0], x, cos, sin)
        for layer, following in pairwise(layers):
            x, q, k, v = self.compiled_bridge(layer, following, x, attend(q, k, v), cos, sin)
        return Layer.post_attention(layers[-1], x, attend(q, k, v))

    def compile_layers(self, bridged: bool = True) -> None:
        """Compile what surrounds products and attention. All layers share the code compiled for the first one.

        `bridged`: compile the end of one layer and the start of the next as one piece, which halves the number of
        calls; not possible with hooks on whole layers, as FSDP has.
        """
        self.compiled_bridge = torch.compile(bridge, dynamic=True) if bridged else None
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.pre_attention = torch.compile(layer.pre_attention, dynamic=True)  # type: ignore[method-assign]
            layer.post_attention = torch.compile(layer.post_attention, dynamic=True)  # type: ignore[method-assign]

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        layout = PackedCausal(lengths, ids.device, shared)
        if layout.computed is None or layout.restore is None:
            return self(ids, layout.positions, layout)
        return self(ids.index_select(0, layout.computed), layout.positions, layout).index_select(0, layout.restore)

    def head(self) -> Tensor:
        return self.lm_head.weight

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights: normal, with a standard deviation of 0.02 in embedding and head, and of 1 / sqrt(inputs) in
        the layers, where the projections into the residual stream are scaled down by depth.

        The usual 0.02 everywhere suits hidden sizes near 2,500; narrow models learn several times slower with it.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = weight.shape[1] ** -0.5 if ".layers." in name else 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * self.spec.layers)
                weight.copy_(torch.empty(weight.shape, device="cpu").normal_(0.0, std, generator=generator))
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.fill_(1.0)


def bridge(
    layer: Layer, following: Layer, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything from the attention of one layer to that of the next."""
    x = Layer.post_attention(layer, x, attended)
    return x, *Layer.pre_attention(following, x, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout that Hugging Face checkpoints use."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_frequencies(spec: ModelSpec) -> Tensor:
    steps = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device="cpu").float()
    freq = 1.0 / (spec.rope_theta ** (steps / spec.head_dim))
    scaling = dict(spec.rope_scaling)
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        freq = freq / scaling["factor"]
    elif kind == "llama3":
        freq = llama3_frequencies(freq, **{key: scaling[key] for key in LLAMA3_SCALING})
    return freq


def llama3_frequencies(
    freq: Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between the two."""
    rotations = original_max_position_embeddings * freq / (2 * math.pi)  # within the original context
    blend = ((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * freq / factor + blend * freq


EMBEDDING = "model.embed_tokens.weight"
NAMED = 5  # weights that an error message lists


class WeightLoader:
    """Builds a decoder: `load` each weight under its Hugging Face name, then `finish`.

    `report`: receives the number of loaded parameters and that of all parameters.
    """

    def __init__(
        self,
        spec: ModelSpec,
        what: str,
        device: torch.device | str,
        dtype: torch.dtype,
        report: LoadReport | None = None,
    ) -> None:
        self.what, self.spec, self.report = what, spec, report
        with torch.device("meta"):
            self.model = Decoder(spec)
        self.model.to(dtype).to_empty(device=device)
        self.targets = dict(self.model.named_parameters())
        self.missing = dict.fromkeys(self.targets)
        self.loaded, self.total = 0, sum(target.numel() for target in self.targets.values())
        self.unexpected: list[str] = []

    @torch.no_grad()
    def load(self, name: str, shape: Sequence[int], write: Callable[[Tensor], object]) -> None:
        """Let `write` fill the weight called `name`, if the model has it and the shape matches."""
        if name.startswith(("embed_tokens.", "layers.", "norm.")):
            name = f"model.{name}"  # of a checkpoint that was saved without the language-model head
        if name.endswith("rotary_emb.inv_freq"):
            return  # computed from the config
        if self.spec.tied and name == "lm_head.weight":
            if EMBEDDING not in self.missing:
                return
            name = EMBEDDING  # used unless the embedding itself is stored too
        if name not in self.targets:
            self.unexpected.append(name)
            return
        target = self.targets[name]
        if tuple(shape) != tuple(target.shape):
            expected = list(target.shape)
            raise UserError(f"{self.what}: weight {name} has shape {list(shape)}, but its config asks for {expected}")
        write(target)
        self.missing.pop(name, None)
        self.loaded += target.numel()
        if self.report is not None:
            self.report(self.loaded, self.total, "parameters")

    def finish(self) -> Decoder:
        if self.missing:
            raise UserError(f"{self.what} lacks weights that its config asks for: {listed(list(self.missing))}")
        if self.unexpected:
            raise UserError(f"{self.what} has weights that its config does not know: {listed(self.unexpected)}")
        return self.model


def listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(sorted(names)[:NAMED]) + more
