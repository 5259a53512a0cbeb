"""From starting Python to the first generated token."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.bench.engine import Options, build, named, settings_of
from assay.bench.workload import Workload, words_of
from assay.engine import Failed
from assay.types import UserError

FIRST_TOKEN = "first token"  # the line that the started process prints
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def print_first_token(work: Workload, options: Options) -> None:
    """What the started process does: generate until the first token arrives."""
    model, engine, _, _ = build(work, options)
    ids = [engine.add(replace(request, stream=True)) for request in work.make_requests(model.vocab_size, run=0)]
    event = engine.step()[0]
    if isinstance(event, Failed):
        raise UserError(event.error)
    print(FIRST_TOKEN, flush=True)
    engine.abort(ids)


def measure_startup(work: Workload, options: Options) -> list[dict[str, Any]]:
    """Twice with one cache of compiled kernels, which the first finds empty."""
    words = ["bench", "engine", *words_of(work), *words_of(options)]
    with tempfile.TemporaryDirectory(prefix="assay-startup-") as folder:
        caches = {name: str(Path(folder) / name.lower()) for name in CACHES}
        cold, warm = (seconds_to_first_token([*words, "--first-token"], caches) for _ in range(2))
    row = {
        "id": named(f"startup-{work.label}", options),
        "system": "assay",
        "seconds": round(warm, 3),
        "seconds_cold": round(cold, 3),
        "runs": [round(cold, 3), round(warm, 3)],
        **settings_of(work, options),
        "command": shlex.join(["assay", *words, "--startup"]),
    }
    return [row]


def seconds_to_first_token(words: Sequence[str], environment: dict[str, str]) -> float:
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "assay", *words],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = any(line.strip() == FIRST_TOKEN for line in process.stdout)
            seconds = time.perf_counter() - start
            process.communicate()
        finally:
            process.kill()
            process.wait()
        if said:
            return seconds
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise UserError(f"the process that was started gave no token: {reason.removeprefix('assay: ')}")
