"""Decoding steps in C, for float32 on a CPU: `kernels/cpu.c`, compiled at first use.

Without a working compiler, the slower torch implementations are used (`network.py`, `attention.py`, `sampler.py`).
To force this, set the environment variable CC to a command that is not a compiler.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.engine.native.network import FusedDecoder, QKNorms, TokenPositions
from assay.engine.native.runner import Runner
from assay.engine.sampler import BLOCK, GOLDEN, LOG_STEPS, MULTIPLIERS, Rows
from assay.engine.sequence import BLOCK_SIZE, WIDTH, Column, RowState
from assay.models.spec import BlockDesign, ModelSpec

SOURCE = Path(__file__).parent / "kernels" / "cpu.c"
DEFINES = {
    **{member.name: member.value for member in (*Column, *RowState)},
    "WIDTH": WIDTH,
    "PART": BLOCK,
    "GOLDEN": f"{GOLDEN % 2**64}u",
    "FIRST_MULTIPLIER": f"{MULTIPLIERS[0] % 2**64}u",
    "SECOND_MULTIPLIER": f"{MULTIPLIERS[1] % 2**64}u",
}
FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 60  # it takes about one second
SMALL_PRODUCT = 2**22  # multiplications; a step with a larger product uses torch, with several threads
THREAD_WORK = 2**21  # numbers to read per thread, about a millisecond: less is not worth another thread

Pointer, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, Sequence[Any]] = {
    "place_rows": (Pointer, Pointer, Int, Int, Int, Pointer, Pointer),
    "rms_norm": (Pointer, Pointer, Int, Int, Float, Float, Pointer),
    "gated": (Pointer, Int, Int, Int, Pointer),
    "rope_store": (Pointer, *[Int] * 6, *[Pointer] * 5, Float, Float, Pointer, Int),
    "attend_rows": (Pointer, Int, Pointer, Int, Int, Pointer, Int, Pointer, *[Int] * 6, Float, Pointer, Pointer),
    "decode_rows": (Pointer, Float, Pointer, Pointer, *[Int] * 3, Pointer, Int, Int, *[Pointer] * 4),
    "sample_rows": (Pointer, Int, Pointer, Pointer, Int, Pointer, Pointer, Int, Pointer, Pointer),
}


def library_for(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    return load_library(os.environ.get("CC", "cc")) if device.type == "cpu" and dtype == torch.float32 else None


@cache
def load_library(compiler: str) -> ctypes.CDLL | None:
    """Compiled by each process: code for this machine may not run on another one with the same files."""
    with tempfile.TemporaryDirectory(prefix="assay-") as folder:
        path = f"{folder}/cpu.so"
        defines = [f"-D{name}={value}" for name, value in DEFINES.items()]
        command = [*shlex.split(compiler), *FLAGS, *defines, "-o", path, str(SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S, capture_output=True)
            library = ctypes.CDLL(path)
        except (OSError, subprocess.SubprocessError):
            return None
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


class CompiledOperations:
    """`TorchOperations` in C; all tensors must be contiguous."""

    def __init__(self, spec: ModelSpec, angles: Tensor, library: ctypes.CDLL) -> None:
        self.spec, self.library = spec, library
        self.rotations = torch.cat((angles.cos(), angles.sin()), dim=-1).contiguous()

    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions:
        return TokenPositions(positions.contiguous(), slots.contiguous())

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        offsets = self.spec.norm_eps, self.spec.design.norm_offset
        self.library.rms_norm(x.data_ptr(), weight.data_ptr(), *x.shape, *offsets, out.data_ptr())
        return out

    def activate(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape
        out = gate_up.new_empty(rows, size // 2)
        gelu = self.spec.design.activation == "gelu_tanh"
        self.library.gated(gate_up.data_ptr(), rows, size // 2, gelu, out.data_ptr())
        return out

    def rotate_and_store(self, qkv: Tensor, at: TokenPositions, norms: QKNorms, kv: Tensor, table: int) -> Tensor:
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        rows, design = qkv.shape[0], self.spec.design
        self.library.rope_store(
            *(qkv.data_ptr(), rows, heads, kv_heads, size, self.spec.rotated, design.interleaved_rope),
            *(at.positions.data_ptr(), at.slots.data_ptr(), self.rotations[table].data_ptr()),
            *((None, None) if norms is None else (norm.data_ptr() for norm in norms)),
            *(self.spec.norm_eps, design.norm_offset, kv.data_ptr(), kv.shape[2] * kv.shape[3]),
        )
        return qkv.view(rows, -1, size)[:, :heads]


class CompiledAttention:
    """`RowAttention` in C: reads the cache in place, and nothing behind the end of a sequence."""

    def __init__(self, library: ctypes.CDLL, tables: Tensor, positions: Tensor, span: int) -> None:
        self.library, self.tables, self.positions, self.span = library, tables, positions, span

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        rows, heads, size = q.shape
        _, kv_heads, blocks, block, _ = kv.shape
        out = torch.empty(rows, heads, size)

        def attend(start: int, stop: int) -> None:
            scores = torch.empty(self.span)
            self.library.attend_rows(
                *(address(q, start), q.stride(0), kv.data_ptr(), blocks, block),
                *(address(self.tables, start), self.tables.stride(0), address(self.positions, start), self.span),
                *(stop - start, heads, kv_heads, size, window, scale or 1 / math.sqrt(size)),
                *(scores.data_ptr(), address(out, start)),
            )

        in_threads(attend, rows, self.span * heads * size)
        return out


class SmallModel:
    """Sizes and weights in the layout of the C struct, for steps that are one call."""

    def __init__(self, network: FusedDecoder, rotations: Tensor) -> None:
        spec = network.spec
        layers = [
            (
                *(layer.norms[0], layer.qkv, layer.qkv_bias, *(layer.qk_norms or (None, None))),
                *(layer.out, layer.out_bias, layer.norms[2]),
                *(layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias),
            )
            for layer in network.layers
        ]
        self.spec = spec
        pointers = [[w.data_ptr() if isinstance(w, Tensor) else 0 for w in layer] for layer in layers]
        self.layers = np.array(pointers)
        sizes = (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate, spec.vocab_size)
        assert isinstance(network.head, Tensor)
        shared = (w.data_ptr() for w in (network.embedding, network.norm, network.head, rotations))
        self.model = np.array([*sizes, *shared, self.layers.ctypes.data])

    @staticmethod
    def fits(network: FusedDecoder) -> bool:
        """Only for the usual layers: all others are computed operation by operation."""
        spec = network.spec
        usual = spec.design == BlockDesign() and not (spec.windows or spec.no_rope or spec.rotary or spec.query_scalar)
        matrices = [w for layer in network.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        by_columns = all(isinstance(w, Tensor) and w.t().is_contiguous() for w in (*matrices, network.head))
        return usual and network.shard is None and by_columns

    def logits(self, library: ctypes.CDLL, rows: Rows, kv: Tensor, size: int, span: int) -> Tensor:
        spec, tables = self.spec, rows.tables
        most = max(spec.heads * spec.head_dim, spec.intermediate)
        positions, scores = torch.empty(2, size, dtype=torch.int64), torch.empty(span)
        work, out = torch.empty(size, 2 * spec.hidden + 4 * most), torch.empty(size, spec.vocab_size)
        library.decode_rows(
            *(self.model.ctypes.data, spec.norm_eps, rows.ints.data_ptr(), tables.data_ptr(), tables.stride(0)),
            *(size, span, kv.data_ptr(), kv.shape[3], kv.shape[4]),
            *(positions.data_ptr(), scores.data_ptr(), work.data_ptr(), out.data_ptr()),
        )
        return out


class CompiledRunner(Runner):
    """`Runner` with decoding steps in C, except large matrix products, truncation and forbidden tokens."""

    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor, library: ctypes.CDLL) -> None:
        super().__init__(network, rows, kv)
        self.library, self.small, spec = library, None, network.spec
        if SmallModel.fits(network) and isinstance(network.ops, CompiledOperations):
            self.small = SmallModel(network, network.ops.rotations)
        self.max_rows = SMALL_PRODUCT // (spec.hidden * max(2 * spec.intermediate, spec.vocab_size))

    def _step(self, size: int, span: int) -> None:
        rows = self.rows
        if self.small is not None and size <= self.max_rows:
            logits = self.small.logits(self.library, rows, self.kv, size, span)
        else:
            logits = self._logits(size, span)
        if rows.modes.truncate or rows.modes.forbids:
            rows.draw(logits)
        else:
            self._draw(logits)
            rows.step += 1

    def _logits(self, size: int, span: int) -> Tensor:
        rows, tables = self.rows, self.rows.tables
        positions, slots = torch.empty(2, size, dtype=torch.int64)
        self.library.place_rows(
            *(rows.ints.data_ptr(), tables.data_ptr(), tables.stride(0), BLOCK_SIZE, size),
            *(positions.data_ptr(), slots.data_ptr()),
        )
        attend = CompiledAttention(self.library, tables, positions, span)
        at = self.network.ops.token_positions(positions, slots)
        hidden = self.network.forward(rows.column(Column.TOKEN, size), at, self.kv, attend)
        return self.network.unembed(hidden)

    def _draw(self, logits: Tensor) -> None:
        rows, (count, size) = self.rows, logits.shape
        place = int(rows.step) % LOG_STEPS
        tokens, scores = rows.log_tokens[place], rows.log_scores[0, place]

        def draw(start: int, stop: int) -> None:
            weights, sums = torch.empty(size), torch.empty(size // BLOCK + 1, dtype=torch.float64)
            self.library.sample_rows(
                *(address(logits, start), size, address(rows.ints, start), address(rows.floats, start), stop - start),
                *(address(tokens, start), address(scores, start), rows.log_scores.stride(0)),
                *(weights.data_ptr(), sums.data_ptr()),
            )

        in_threads(draw, count, size)


def address(x: Tensor, row: int) -> int:
    """Address of a row."""
    return x.data_ptr() + row * x.stride(0) * x.element_size()


def in_threads(work: Callable[[int, int], None], rows: int, numbers: int) -> None:
    """Split rows over torch's number of threads, if each has enough to do; `numbers`: numbers to read per row."""
    threads = min(torch.get_num_threads(), rows, 1 + rows * numbers // THREAD_WORK)
    if threads == 1:
        work(0, rows)
    else:
        bounds = [rows * i // threads for i in range(threads + 1)]
        list(pool(threads).map(work, bounds[:-1], bounds[1:]))


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
