"""Uploads to a local server in place of the Hugging Face hub, with the hub's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Uploads, upload_hub

from assay.build.export import HubRepository
from assay.types import UserError


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with upload_hub() as uploads:
        monkeypatch.setenv("HF_ENDPOINT", uploads.url)
        yield uploads


def test_a_folder_is_uploaded_in_one_commit_and_replaces_older_shards(server: Uploads, tmp_path: Path) -> None:
    server.files = {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"kept"}
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    (tmp_path / "README.md").write_text("card")
    repository = HubRepository("me/model", private=True)
    assert "commit" in repository.upload(tmp_path, ("model*.safetensors",))
    assert server.files.pop("notes.txt") == b"kept"
    assert server.files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert server.created[0]["name"] == "model" and server.created[0]["visibility"] == "private"
    assert "Bearer hf_secret" in server.tokens


@pytest.mark.parametrize(
    ("status", "expected"), [(401, "may not write to me/model"), (403, "may not write"), (503, "HTTP 503")]
)
def test_a_refusal_is_one_line(server: Uploads, status: int, expected: str) -> None:
    server.denied = status
    with pytest.raises(UserError, match=expected) as error:
        HubRepository("me/model", private=False)
    assert "\n" not in str(error.value) and "hf_secret" not in str(error.value)


def test_no_token_no_name_and_no_network_say_what_to_do(
    server: Uploads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="OWNER/NAME"):
        HubRepository("model", private=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot be written .*check the network"):
        HubRepository("me/model", private=False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="hf auth login"):
        HubRepository("me/model", private=False)
