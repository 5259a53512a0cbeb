"""Where the noise of a request comes from."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, prompt_id: str, turn: int = 0) -> int:
    """64 bits that depend on these four and nothing else: a sample can be drawn again alone, later, in any batch."""
    key = f"{run_seed}|{step}|{prompt_id}|{turn}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)
