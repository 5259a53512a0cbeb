"""Servers read exactly the weights that the transports write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_parts import small_decoder, small_spec

from assay.engine.remote.server_side import weights_of_buffer, weights_of_folder
from assay.engine.remote.transport import FolderTransport, IpcTransport
from assay.models.fingerprint import digests

POLICY = small_decoder(small_spec("qwen2"))


def test_weights_of_a_folder_are_those_that_were_written(tmp_path: Path) -> None:
    with FolderTransport(tmp_path).written(POLICY.weights(), 0) as folder:
        assert digests(weights_of_folder(folder)) == digests(POLICY.weights())
    with pytest.raises(FileNotFoundError, match="do trainer and server share this folder"):
        next(weights_of_folder(tmp_path))


@pytest.mark.parametrize("chunk_bytes", [256, 10_000, 10**7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_buffer_hold_all_weights(chunk_bytes: int, dtype: torch.dtype) -> None:
    chunks = IpcTransport(torch.device("cpu"), dtype, chunk_bytes).chunks(POLICY.weights())
    received = dict(pair for buffer, layout in chunks for pair in weights_of_buffer(buffer, layout))
    assert digests(received.items()) == digests(POLICY.weights(), dtype)
