"""Result files: rows are merged, other files rejected, writes are atomic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from assay.bench.results import (
    describe_machine,
    describe_versions,
    earlier_rows,
    peer_rows,
    peer_steps,
    save,
    with_ratios,
)
from assay.types import UserError

MACHINE = {"gpu": None, "cores": 2}
VERSIONS = {"torch": "2.0", "assay": "1"}


def row(row_id: str, system: str = "assay", **facts: Any) -> dict[str, Any]:
    return {"id": row_id, "system": system, **facts}


def test_rows_are_merged_by_id_and_system(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    save(file, MACHINE, VERSIONS, "first", [row("a", tokens_per_s=1), row("b", tokens_per_s=2)])
    save(file, MACHINE, VERSIONS, "second", [row("a", tokens_per_s=3), row("a", "other", tokens_per_s=4)])
    content = json.loads(file.read_text())
    assert content["machine"] == MACHINE and content["versions"] == VERSIONS and content["command"] == "second"
    assert content["rows"] == [
        row("a", tokens_per_s=3),
        row("b", tokens_per_s=2),
        row("a", "other", tokens_per_s=4),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_results_of_another_machine_or_version_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    save(file, MACHINE, VERSIONS, "first", [row("a")])
    before = file.read_bytes()
    for machine, versions, message in (
        ({"gpu": "X", "cores": 2}, VERSIONS, r"other machine \(gpu None, now X\)"),
        (MACHINE, {**VERSIONS, "cuda": "12"}, r"other versions \(cuda None, now 12\)"),
    ):
        with pytest.raises(UserError, match=message):
            save(file, machine, versions, "", [row("b")])
    assert file.read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", "{", '{"machine": {}, "versions": {}, "rows": [{}]}', '{"rows": []}'])
def test_other_files_are_not_overwritten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    with pytest.raises(UserError, match="not a file of benchmark results: give another --json file"):
        save(file, MACHINE, VERSIONS, "", [row("a")])
    assert file.read_text() == content


def test_a_failed_write_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    save(file, MACHINE, VERSIONS, "first", [row("a")])
    before = file.read_bytes()

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="No space left"):
        save(file, MACHINE, VERSIONS, "second", [row("b")])
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UserError, match="does not exist"):
        earlier_rows(tmp_path / "nowhere" / "x.json", MACHINE, VERSIONS)


def test_rows_and_ratios_from_the_output_of_another_engine(tmp_path: Path) -> None:
    file = tmp_path / "peer.txt"
    lines = [
        "INFO loading weights",
        '{"engine": "vllm", "shape": "0.5b", "logprobs": false, "tokens_per_s": 51000}',
        '{"engine": "vllm", "shape": "0.5b", "logprobs": true, "tokens_per_s": 36000}',
        '{"engine": "vllm", "shape": "0.5b", "logprobs": true, "tokens_per_s": 30000}',
        '{"engine": "vllm", "shape": "0.5b", "logprobs": true, "tokens_per_s": 37000}',
        '{"engine": "vllm", "shape": "1.5b", "logprobs": true, "tokens_per_s": 20000}',
        '{"shape": "0.5b"}',
        "{broken",
        "[1, 2]",
    ]
    file.write_text("nothing here\n")
    with pytest.raises(UserError, match="has no line such as"):
        peer_rows(file)
    file.write_text("\n".join(lines))
    peers = peer_rows(file)
    assert [(p["id"], p["system"], p["logprobs"], p["tokens_per_s"]) for p in peers] == [
        ("gen-0.5b-16x64x256", "vllm", False, 51000),
        ("gen-0.5b-16x64x256", "vllm", True, 36000),
        ("gen-1.5b-16x64x256", "vllm", True, 20000),
    ]
    ours = row("gen-0.5b-16x64x256", tokens_per_s=216000.0)
    other, start = row("gen-0.5b-longtail", tokens_per_s=1.0), row("startup-0.5b", seconds=3.0)
    assert with_ratios([*peers, ours, other, start])[3:] == [ours | {"ratio_to_vllm": 6.0}, other, start]
    # Also if the rows are added later.
    results = tmp_path / "results.json"
    save(results, MACHINE, VERSIONS, "", [ours])
    save(results, MACHINE, VERSIONS, "", peers)
    assert json.loads(results.read_text())["rows"][0]["ratio_to_vllm"] == 6.0


def test_rows_and_ratios_from_the_output_of_another_trainer(tmp_path: Path) -> None:
    file = tmp_path / "trl.txt"
    steps = [("hf", 40, 20.5), ("hf", 27, 30.0), ("hf", 24, 29.0), ("vllm", 80, 82.0), ("vllm", 30.5, 80.0)]
    lines = [json.dumps({"system": "trl", "mode": mode, "step_s": s, "peak_gib": gib}) for mode, s, gib in steps]
    once = '{"system": "trl", "mode": "once", "step_s": 3, "peak_gib": 1}'
    file.write_text("\n".join(["loading", *lines, once, '{"system": "trl", "mode": "hf", "step_s": 0, "peak_gib": 1}']))
    plain, vllm = peer_steps(file)
    shared = {"id": "step-0.5b-16x64x256"}
    assert plain == {**shared, "system": "trl", "step_s": 25.5, "runs": [27, 24], "first_step_s": 40, "peak_gib": 30.0}
    assert vllm["system"] == "trl-vllm" and vllm["step_s"] == 30.5 and vllm["peak_gib"] == 82.0
    file.write_text(once)
    with pytest.raises(UserError, match="needs at least two lines such as"):
        peer_steps(file)
    ours = row("step-0.5b-16x64x256", step_s=3.0)
    rows = with_ratios([ours, plain, vllm, row("train-0.5b-16x1024", tokens_per_s=5.0)])
    assert rows[0] == ours | {"ratio_to_trl": 8.5, "ratio_to_trl-vllm": 10.167} and rows[1] == plain
    assert not any("ratio" in name for name in rows[3])


def test_machine_and_versions_are_json_and_constant() -> None:
    machine, versions = describe_machine(), describe_versions()
    assert json.loads(json.dumps([machine, versions])) == [describe_machine(), describe_versions()]
    assert {"gpu", "cpu", "cores", "memory_gib"} <= machine.keys() and machine["cpu"] and machine["cores"] >= 1
    assert versions.keys() == {"python", "torch", "triton", "cuda", "transformers", "assay"}
    assert versions["torch"] and versions["transformers"]
