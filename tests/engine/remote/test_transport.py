"""Weight transport: servers read exactly the weights that the transports write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_parts import small_decoder, small_spec

from assay.engine.remote.server_side import weights_of_buffer, weights_of_folder
from assay.engine.remote.transport import FolderTransport, IpcTransport, fast_folder
from assay.models.fingerprint import digests
from assay.types import UserError

POLICY = small_decoder(small_spec("qwen2"))


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 10**9])
def test_a_folder_holds_every_weight_in_the_dtype_of_the_server(tmp_path: Path, shard_bytes: int) -> None:
    transport = FolderTransport(tmp_path / "new", torch.bfloat16, shard_bytes=shard_bytes)
    expected = {name: weight.bfloat16() for name, weight in POLICY.weights()}
    with transport.written(POLICY.weights(), 3) as folder:
        saved = dict(weights_of_folder(folder))
        assert saved.keys() == expected.keys()
        assert all(saved[name].dtype == torch.bfloat16 and saved[name].equal(expected[name]) for name in expected)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_weight_that_is_overwritten_while_files_are_written_is_saved_as_it_was(tmp_path: Path) -> None:
    buffer = torch.empty(1000)

    def weights():
        for value in range(20):
            yield f"w{value}", buffer.fill_(value)  # as a gather into one buffer

    with FolderTransport(tmp_path, shard_bytes=4000).written(weights(), 0) as folder:
        assert all(bool((tensor == int(name[1:])).all()) for name, tensor in weights_of_folder(folder))


def test_a_temporary_folder_is_removed_at_the_end() -> None:
    transport = FolderTransport()
    with transport.written(POLICY.weights(), 0) as folder:
        assert folder.parent == transport.folder
    transport.close()
    assert not transport.folder.exists()
    assert fast_folder(10**18) is None


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with (
        pytest.raises(UserError, match=r"cannot write weights to .*: free some space, or choose another folder"),
        FolderTransport(file).written(POLICY.weights(), 0),
    ):
        pass


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="do trainer and server share this folder"):
        next(weights_of_folder(tmp_path))


@pytest.mark.parametrize("chunk_bytes", [256, 10_000, 10**7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_buffer_hold_all_weights(chunk_bytes: int, dtype: torch.dtype) -> None:
    chunks = IpcTransport(torch.device("cpu"), dtype, chunk_bytes).chunks(POLICY.weights())
    received = dict(pair for buffer, layout in chunks for pair in weights_of_buffer(buffer, layout))
    assert digests(received.items()) == digests(POLICY.weights(), dtype)
