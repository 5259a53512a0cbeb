"""The decoder as the engine runs it: the function of `assay.models.decoder.Decoder`, in fewer and larger operations.

Queries, keys and values come from one product, gate and up from another. The canonical weights, by their Hugging Face
names, are views of rows of the fused ones: filling the views fills the network, and the fingerprint reads what is
really served.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.decoder import Attend, rope_frequencies
from assay.models.spec import ModelSpec


class FusedLayer:
    def __init__(self, spec: ModelSpec, index: int, device: torch.device, dtype: torch.dtype) -> None:
        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        self.spec, self.index = spec, index
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv, self.out = new(queries + 2 * keys, spec.hidden), new(spec.hidden, queries)
        self.qkv_bias = new(queries + 2 * keys) if spec.qkv_bias else None
        self.out_bias = new(spec.hidden) if spec.out_bias else None
        self.gate_up, self.down = new(2 * spec.intermediate, spec.hidden), new(spec.hidden, spec.intermediate)
        self.gate_up_bias = new(2 * spec.intermediate) if spec.mlp_bias else None
        self.down_bias = new(spec.hidden) if spec.mlp_bias else None
        self.input_norm, self.mlp_norm = new(spec.hidden), new(spec.hidden)
        self.q_norm = new(spec.head_dim) if spec.qk_norm else None
        self.k_norm = new(spec.head_dim) if spec.qk_norm else None

    def canonical(self) -> dict[str, Tensor]:
        """Views under their Hugging Face names."""
        spec, prefix = self.spec, f"model.layers.{self.index}."
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        split = [queries, keys, keys]
        names: dict[str, Tensor | None] = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "self_attn.o_proj.weight": self.out,
            "self_attn.o_proj.bias": self.out_bias,
            "mlp.down_proj.weight": self.down,
            "mlp.down_proj.bias": self.down_bias,
        }
        for kind, qkv, gate_up in (("weight", self.qkv, self.gate_up), ("bias", self.qkv_bias, self.gate_up_bias)):
            if qkv is not None:
                parts = qkv.split(split)
                names |= {f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
            if gate_up is not None:
                gate, up = gate_up.chunk(2)
                names |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
        return {prefix + name: value for name, value in names.items() if value is not None}

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self._project(x, cos, sin)
        x = residual(x, attend(self.index, q, k, v).flatten(1), self.out, self.out_bias)
        gate, up = F.linear(self._norm(x, self.mlp_norm), self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return residual(x, F.silu(gate).mul_(up), self.down, self.down_bias)

    def _project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.spec.heads, self.spec.kv_heads
        qkv = F.linear(self._norm(x, self.input_norm), self.qkv, self.qkv_bias)
        qkv = qkv.view(x.shape[0], heads + 2 * kv_heads, self.spec.head_dim)
        turned, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            scales = torch.cat((self.q_norm.expand(heads, -1), self.k_norm.expand(kv_heads, -1)))
            turned = F.rms_norm(turned, turned.shape[-1:], None, self.spec.norm_eps) * scales
        turned = torch.addcmul(turned * cos, turned.roll(self.spec.head_dim // 2, dims=-1), sin)
        return turned[:, :heads], turned[:, heads:], v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)


class FusedDecoder:
    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.embedding = torch.zeros(spec.vocab_size, spec.hidden, device=device, dtype=dtype)
        self.head = self.embedding if spec.tied else torch.zeros_like(self.embedding)
        self.norm = torch.zeros(spec.hidden, device=device, dtype=dtype)
        self.layers = [FusedLayer(spec, index, device, dtype) for index in range(spec.layers)]
        self.inv_freq = rope_frequencies(spec).to(device)

    def canonical(self) -> dict[str, Tensor]:
        """Every weight once, under its Hugging Face name, as a view of what is served."""
        names = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tied:
            names["lm_head.weight"] = self.head
        for layer in self.layers:
            names |= layer.canonical()
        return names

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, D] for token ids [N] at positions [N]."""
        x = F.embedding(ids, self.embedding)
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), dim=-1)[:, None].to(x.dtype)
        sin = torch.cat((-sin, sin), dim=-1)[:, None].to(x.dtype)
        for layer in self.layers:
            x = layer.forward(x, cos, sin, attend)
        return F.rms_norm(x, self.norm.shape, self.norm, self.spec.norm_eps)

    def unembed(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)


def residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + y @ weight.T (+ bias), in one operation where there is no bias."""
    if bias is None:
        return torch.addmm(x, y, weight.t())
    return x + F.linear(y, weight, bias)
