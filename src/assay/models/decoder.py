"""The decoder that the trainer computes with, for all families of `spec.FAMILIES`.

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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from assay.models.attention import PackedCausal
from assay.models.base import LoadOptions, PolicyModel, autocast_dtype
from assay.models.device import check_compile_cache, is_deterministic
from assay.models.spec import LLAMA3_SCALING, ModelSpec
from assay.types import UserError

# (queries [N, heads, d], keys [N, kv_heads, d], values [N, kv_heads, d], window, scale) -> [N, heads, d]
Attend = Callable[[Tensor, Tensor, Tensor, int, float | None], Tensor]
PARTIAL = 0.5
GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class Norm(nn.Module):
    def __init__(self, size: int, spec: ModelSpec) -> None:
        super().__init__()
        self.eps, self.offset = spec.norm_eps, spec.design.norm_offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if offset:  # in at least 32 bits: in 16, the sum would lose most digits of the weight
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), (x.shape[-1],), weight.to(wide) + offset, eps).to(x.dtype)
    # Under autocast x is bfloat16 and the weight float32: the fused kernel wants one dtype.
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim, self.design = spec.head_dim, spec.design
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.sizes = [queries, keys, keys]
        if self.design.fused_qkv:
            self.qkv_proj = nn.Linear(spec.hidden, sum(self.sizes), bias=spec.qkv_bias)
        else:
            self.q_proj = nn.Linear(spec.hidden, queries, bias=spec.qkv_bias)
            self.k_proj = nn.Linear(spec.hidden, keys, bias=spec.qkv_bias)
            self.v_proj = nn.Linear(spec.hidden, keys, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(queries, spec.hidden, bias=spec.out_bias)
        widths = (queries, keys) if self.design.qk_norm_over_heads else (spec.head_dim, spec.head_dim)
        self.q_norm = Norm(widths[0], spec) if spec.qk_norm else None
        self.k_norm = Norm(widths[1], spec) if spec.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [N, heads, d]."""
        if self.design.fused_qkv:
            q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.design.qk_norm_over_heads:
            q, k = self.normed(q, k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if not self.design.qk_norm_over_heads:
            q, k = self.normed(q, k)
        interleaved = self.design.interleaved_rope
        return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved), v

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


class Mlp(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.fused, self.activation = spec.design.fused_gate_up, GATES[spec.design.activation]
        if self.fused:
            self.gate_up_proj = nn.Linear(spec.hidden, 2 * spec.intermediate, bias=spec.mlp_bias)
        else:
            self.gate_proj = nn.Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
            self.up_proj = nn.Linear(spec.hidden, spec.intermediate, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.activation(gate) * up)


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec, index: int) -> None:
        super().__init__()
        self.window, self.scale, self.rope_table = spec.window(index), spec.attention_scale, spec.rope_table(index)
        self.self_attn = Attention(spec)
        self.mlp = Mlp(spec)
        self.norms = spec.design.norms
        for name in filter(None, self.norms):
            self.add_module(name, Norm(spec.hidden, spec))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.post_attention(x, attend(*self.pre_attention(x, cos, sin), self.window, self.scale))

    def pre_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn(self.norm(0, x), cos, sin)

    def post_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.norm(1, self.self_attn.o_proj(attended.flatten(-2)))
        return x + self.norm(3, self.mlp(self.norm(2, x)))

    def norm(self, place: int, x: Tensor) -> Tensor:
        """Apply the norm at one of the four places of `BlockDesign.norms`, if there is one."""
        name = self.norms[place]
        return getattr(self, name)(x) if name else x


class Trunk(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec, index) for index in range(spec.layers))
        self.norm = Norm(spec.hidden, spec)


class Decoder(PolicyModel):
    inv_freq: Tensor  # [tables, rotated / 2]: see `rope_tables`
    supports_prefix_sharing = True
    recompute = False  # activation checkpointing: store only the inputs of layers; less memory, a third more time
    offload = False  # with `recompute`: store these inputs in CPU memory
    compiled_bridge: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None  # see `compile_layers`

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.vocab_size, self.max_length = spec.vocab_size, spec.max_length
        self.model = Trunk(spec)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab_size, bias=False)
        if spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("inv_freq", rope_tables(spec).to(torch.get_default_device()), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        """Move or cast without rounding the rotary frequencies or separating a tied head (as `to_empty` would)."""
        super()._apply(fn, recurse)
        self.inv_freq = rope_tables(self.spec).to(self.inv_freq.device)
        if self.spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, D] for token ids [N] at positions [N]."""
        x = self.model.embed_tokens(ids)
        x = x.to(autocast_dtype(x))  # the residual stream has this dtype too, as in an engine
        if self.spec.design.scaled_embedding:
            x = x * embedding_scale(self.spec, x.dtype)
        angles = positions[:, None].float() * self.inv_freq.float()[:, None]  # [tables, N, rotated / 2]
        # Each cosine and sine is [N, 1, rotated / 2].
        rotations = [(table.cos()[:, None].to(x.dtype), table.sin()[:, None].to(x.dtype)) for table in angles]
        if self.compiled_bridge is not None:
            return self.model.norm(self._forward_bridged(x, rotations, attend))
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            cos, sin = rotations[layer.rope_table]
            if self.recompute and torch.is_grad_enabled():
                with save_on_cpu(pin_memory=x.is_cuda) if self.offload else nullcontext():
                    x = checkpoint(layer, x, cos, sin, attend, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend)
        return self.model.norm(x)

    def _forward_bridged(self, x: Tensor, rotations: list[tuple[Tensor, Tensor]], attend: Attend) -> Tensor:
        """The layers, with everything between two attention operations as one compiled call. The start of the
        first and the end of the last layer are not compiled: for one layer each, it would take longer than it saves."""
        assert self.compiled_bridge is not None
        layers: list[Layer] = list(self.model.layers)  # type: ignore[arg-type]
        q, k, v = Layer.pre_attention(layers[0], x, *rotations[layers[0].rope_table])
        for layer, following in pairwise(layers):
            attended = attend(q, k, v, layer.window, layer.scale)
            x, q, k, v = self.compiled_bridge(layer, following, x, attended, *rotations[following.rope_table])
        return Layer.post_attention(layers[-1], x, attend(q, k, v, layers[-1].window, layers[-1].scale))

    def compile_layers(self, bridged: bool = True, partial: bool = False) -> None:
        """Compile what surrounds products and attention. All layers share the code compiled for the first one.

        `bridged`: compile the end of one layer and the start of the next as one piece, which halves the number of
        calls; not possible with hooks on whole layers, as FSDP has, or if layers are recomputed.
        `partial`: recompute activations in the backward pass, beginning with the cheapest, until half of their memory
        is saved.
        """
        check_compile_cache()
        from torch import _dynamo  # takes a second
        from torch._functorch import config

        saved = PARTIAL if partial else 1.0
        if config.activation_memory_budget != saved:
            config.activation_memory_budget = saved
            _dynamo.reset()  # else code that was compiled for another model would be used again
        # The scale of adapters is a constant: as an input, it would be a CPU tensor, and take a C++ compiler 50 s.
        _dynamo.config.specialize_float = True
        if is_deterministic():
            _dynamo.reset()  # also of code that was compiled for other numbers of tokens: see `stop_compiling`
        # Options also apply to the backward pass, which is compiled in another thread. Without the first, layers are
        # compiled again for small numbers of tokens; without the second, some kernels are chosen by measuring them.
        options: Any = {"triton.mix_order_reduction_non_strict_mode": True}
        if is_deterministic():
            options["deterministic"] = True
        if bridged and not self.recompute:
            self.compiled_bridge = torch.compile(bridge, dynamic=True, options=options)
            return
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            for name in ("pre_attention", "post_attention"):
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True, options=options))

    def stop_compiling(self) -> None:
        """Compute with the code that is compiled so far. Calls that it does not fit run without compilation."""
        from torch._dynamo import run

        if self.compiled_bridge is not None:
            self.compiled_bridge = run(self.compiled_bridge)
            return
        for layer in self.model.layers:
            for name in ("pre_attention", "post_attention"):
                setattr(layer, name, run(getattr(layer, name)))

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
                weight.fill_(1.0 - self.spec.design.norm_offset)


def empty_decoder(spec: ModelSpec, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder whose weights are not set yet: the random ones of its layers would be thrown away."""
    with torch.device("meta"):
        model = Decoder(spec).to(dtype)
    return model.to_empty(device=device)


def bridge(
    layer: Layer, following: Layer, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything between the attention of a layer and the attention of the next."""
    x = Layer.post_attention(layer, x, attended)
    return x, *Layer.pre_attention(following, x, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding of the first 2 x cos.shape[-1] dimensions, in the layout of Hugging Face checkpoints:
    the two numbers of a pair are half of these dimensions apart, or neighbors if `interleaved`.
    """
    size = 2 * cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def rope_tables(spec: ModelSpec) -> Tensor:
    """Frequencies [tables, rotated / 2] of the kinds of layers that the model has (see `ModelSpec.rope_table`)."""
    tables = [rope_frequencies(spec)]
    if spec.local_rope_theta:
        tables.append(rope_frequencies(replace(spec, rope_theta=spec.local_rope_theta, rope_scaling=())))
    if spec.no_rope:
        tables.append(torch.zeros_like(tables[0]))  # rotates by an angle of 0
    return torch.stack(tables)


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """The square root of the hidden size, rounded as transformers does."""
    return torch.tensor(math.sqrt(spec.hidden), dtype=torch.float32, device="cpu").to(dtype).item()


def rope_frequencies(spec: ModelSpec) -> Tensor:
    steps = torch.arange(0, spec.rotated, 2, dtype=torch.int64, device="cpu").float()
    freq = 1.0 / (spec.rope_theta ** (steps / spec.rotated))
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
    """Builds a decoder: `load` each weight under its Hugging Face name, then `finish`."""

    def __init__(self, spec: ModelSpec, what: str, options: LoadOptions) -> None:
        self.what, self.spec, self.report = what, spec, options.report
        self.model = empty_decoder(spec, options.device, options.dtype)
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
