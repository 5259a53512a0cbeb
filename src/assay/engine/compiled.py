"""All of a decoding step but its products in C, for float32 on a CPU: `kernels/cpu.c`, compiled when first wanted.

Where there is no compiler, or it fails, torch does the same more slowly (`operations.py`, `attention.py`,
`sampler.py`). To have it that way, set CC to something that is no compiler.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.engine.columns import BLOCK_SIZE, WIDTH, Column, State
from assay.engine.network import FusedDecoder
from assay.engine.operations import Places
from assay.engine.rows import LOG_STEPS, Rows
from assay.engine.runner import Runner
from assay.engine.sampler import BLOCK, GOLDEN, MULTIPLIERS
from assay.models.spec import ModelSpec

SOURCE = Path(__file__).parent / "kernels" / "cpu.c"
DEFINES = {
    **{member.name: member.value for member in (*Column, *State)},
    "WIDTH": WIDTH,
    "PART": BLOCK,
    "GOLDEN": f"{GOLDEN % 2**64}u",
    "FIRST_MULTIPLIER": f"{MULTIPLIERS[0] % 2**64}u",
    "SECOND_MULTIPLIER": f"{MULTIPLIERS[1] % 2**64}u",
}
FLAGS = ("-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
PATIENCE = 60  # seconds for the compiler, which takes about one
WORTH_THREAD = 2**21  # numbers to look at, about a millisecond, for which it is worth to wake another thread

Pointer, Int, Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, Sequence[Any]] = {
    "place_rows": (Pointer, Pointer, Int, Int, Int, Pointer, Pointer),
    "rms_norm": (Pointer, Pointer, Int, Int, Float, Pointer),
    "silu_mul": (Pointer, Int, Int, Pointer),
    "rope_store": (Pointer, *[Int] * 4, *[Pointer] * 5, Float, Pointer, Int),
    "attend_rows": (Pointer, Int, Pointer, Int, Int, Pointer, Int, Pointer, *[Int] * 5, Pointer, Pointer),
    "draw_rows": (Pointer, Int, Pointer, Pointer, Int, Pointer, Pointer, Int, Pointer, Pointer),
}


def library_for(device: torch.device, dtype: torch.dtype) -> ctypes.CDLL | None:
    return library(os.environ.get("CC", "cc")) if device.type == "cpu" and dtype == torch.float32 else None


@cache
def library(compiler: str) -> ctypes.CDLL | None:
    """Compiled anew by each process: what suits this machine need not suit another that has the same files."""
    with tempfile.TemporaryDirectory(prefix="assay-") as folder:
        path = f"{folder}/cpu.so"
        defines = [f"-D{name}={value}" for name, value in DEFINES.items()]
        command = [*shlex.split(compiler), *FLAGS, *defines, "-o", path, str(SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True)
            found = ctypes.CDLL(path)
        except (OSError, subprocess.SubprocessError):
            return None
    for name, types in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


class CompiledOperations:
    """`TorchOperations` in C; all tensors have to be contiguous."""

    def __init__(self, spec: ModelSpec, angles: Tensor, found: ctypes.CDLL) -> None:
        self.spec, self.library = spec, found
        self.turns = torch.cat((angles.cos(), angles.sin()), dim=-1).contiguous()

    def places(self, positions: Tensor, slots: Tensor) -> Places:
        return Places(positions.contiguous(), slots.contiguous())

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self.library.rms_norm(x.data_ptr(), weight.data_ptr(), *x.shape, self.spec.norm_eps, out.data_ptr())
        return out

    def activate(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape
        out = gate_up.new_empty(rows, size // 2)
        self.library.silu_mul(gate_up.data_ptr(), rows, size // 2, out.data_ptr())
        return out

    def rotate_and_store(
        self, qkv: Tensor, places: Places, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        rows = qkv.shape[0]
        self.library.rope_store(
            *(qkv.data_ptr(), rows, heads, kv_heads, size),
            *(places.positions.data_ptr(), places.slots.data_ptr(), self.turns.data_ptr()),
            *(None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)),
            *(self.spec.norm_eps, kv.data_ptr(), kv.shape[2] * kv.shape[3]),
        )
        return qkv.view(rows, -1, size)[:, :heads]


class CompiledAttention:
    """`RowAttention` in C: nothing is copied out of the cache, or looked at behind a sequence's end."""

    def __init__(self, found: ctypes.CDLL, tables: Tensor, positions: Tensor, span: int) -> None:
        self.library, self.tables, self.positions, self.span = found, tables, positions, span

    def __call__(self, kv: Tensor, q: Tensor) -> Tensor:
        rows, heads, size = q.shape
        _, kv_heads, blocks, block, _ = kv.shape
        out = torch.empty(rows, heads, size)

        def attend(start: int, stop: int) -> None:
            scores = torch.empty(self.span)
            self.library.attend_rows(
                *(at(q, start), q.stride(0), kv.data_ptr(), blocks, block),
                *(at(self.tables, start), self.tables.stride(0), at(self.positions, start), self.span),
                *(stop - start, heads, kv_heads, size, scores.data_ptr(), at(out, start)),
            )

        in_threads(attend, rows, self.span * heads * size)
        return out


class CompiledRunner(Runner):
    """`Runner` with a decoding step in C, but for its products, and for draws where tokens are cut off or forbidden."""

    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor, found: ctypes.CDLL) -> None:
        super().__init__(network, rows, kv)
        self.library = found

    def _step(self, size: int, span: int) -> None:
        rows, tables = self.rows, self.rows.tables
        positions, slots = torch.empty(2, size, dtype=torch.int64)
        self.library.place_rows(
            *(rows.ints.data_ptr(), tables.data_ptr(), tables.stride(0), BLOCK_SIZE, size),
            *(positions.data_ptr(), slots.data_ptr()),
        )
        attend = CompiledAttention(self.library, tables, positions, span)
        places = self.network.ops.places(positions, slots)
        hidden = self.network.forward(rows.column(Column.TOKEN, size), places, self.kv, attend)
        logits = self.network.unembed(hidden)
        if rows.modes.truncate or rows.modes.forbids:
            rows.draw(logits)
        else:
            self._draw(logits)
            rows.step += 1

    def _draw(self, logits: Tensor) -> None:
        rows, (count, size) = self.rows, logits.shape
        place = int(rows.step) % LOG_STEPS
        tokens, scores = rows.log_tokens[place], rows.log_scores[0, place]

        def draw(start: int, stop: int) -> None:
            shares, sums = torch.empty(size), torch.empty(size // BLOCK + 1, dtype=torch.float64)
            self.library.draw_rows(
                *(at(logits, start), size, at(rows.ints, start), at(rows.floats, start), stop - start),
                *(at(tokens, start), at(scores, start), rows.log_scores.stride(0)),
                *(shares.data_ptr(), sums.data_ptr()),
            )

        in_threads(draw, count, size)


def at(x: Tensor, row: int) -> int:
    """The address of a row."""
    return x.data_ptr() + row * x.stride(0) * x.element_size()


def in_threads(work: Callable[[int, int], None], rows: int, numbers: int) -> None:
    """Rows from .. to, by as many of torch's threads as have enough to do; `numbers`: those that a row looks at."""
    threads = min(torch.get_num_threads(), rows, 1 + rows * numbers // WORTH_THREAD)
    if threads == 1:
        work(0, rows)
    else:
        bounds = [rows * i // threads for i in range(threads + 1)]
        list(pool(threads).map(work, bounds[:-1], bounds[1:]))


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
