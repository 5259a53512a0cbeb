"""Progress of downloads and of models that transformers loads: counts are reported, and no bars are drawn."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from assay.models import HFModel, build_preset, load_model, save_model
from assay.models.bars import reported_bars, reporting_bar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Counts = list[tuple[int, int, str]]


@contextmanager
def hub(folder: Path, name: str) -> Iterator[str]:
    """A server with the part of the hub's interface that downloads use, for one model; yields its address."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tree = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for path, data in files.items()
    ]
    info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}

    class HubHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}/tree/"):
                data = json.dumps(tree).encode()
            elif path.startswith(f"/api/models/{name}"):
                data = json.dumps(info).encode()
            else:
                data = files.get(path.rpartition("/")[2], b"")
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_download_from_the_hub_reports_bytes_and_then_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build_preset("nano", vocab_size=30, max_length=64, seed=0)
    save_model(model, tmp_path / "model")
    size = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    counts: Counts = []
    with hub(tmp_path / "model", "org/name") as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        loaded = load_model("org/name", cache_dir=tmp_path / "cache", report=lambda *count: counts.append(count))
    assert {name: weight.shape for name, weight in loaded.weights()} == {n: w.shape for n, w in model.weights()}
    downloaded = [count for count in counts if count[2] == "bytes"]
    assert downloaded == sorted(downloaded) and downloaded[-1][:2] == (size, size)
    assert counts[: len(downloaded)] == downloaded and counts[-1][2] == "parameters"
    assert capfd.readouterr().err == ""


def test_a_model_of_transformers_reports_its_tensors_and_draws_no_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(tmp_path)
    shown = logging.is_progress_bar_enabled()
    capfd.readouterr()
    counts: Counts = []
    model = load_model(str(tmp_path), report=lambda *count: counts.append(count))
    assert isinstance(model, HFModel) and len(counts) > 5
    assert {unit for *_, unit in counts} == {"tensors"} and counts == sorted(counts) and counts[-1][0] == counts[-1][1]
    assert capfd.readouterr().err == "" and logging.is_progress_bar_enabled() == shown


def test_bars_of_transformers_are_restored() -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    before = gguf.tqdm
    with pytest.raises(ValueError, match="damaged"), reported_bars(None):
        assert gguf.tqdm is not before
        raise ValueError("damaged")
    assert gguf.tqdm is before and logging.set_tqdm_hook(None) is None


def test_of_several_bars_of_bytes_the_largest_count_is_reported() -> None:
    counts: Counts = []
    bar = reporting_bar(lambda *count: counts.append(count), "bytes", only="B")
    files, received, written = bar(total=2), bar(total=8, unit="B"), bar(total=8, unit="B")
    for one in (files, received, received, written, written, written):
        one.update(2)
    assert counts == [(2, 8, "bytes"), (4, 8, "bytes"), (6, 8, "bytes")]
    assert list(bar("abc")) == ["a", "b", "c"]
