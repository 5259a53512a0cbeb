"""Counters of several processes in one array, and their text format."""

from __future__ import annotations

from assay.engine.base import EngineLoad
from assay.server.service import ACTIVE, FIRST_TOKEN, SIZE, Metrics


def values(text: str) -> dict[str, float]:
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_any_process_reports_the_sums() -> None:
    shared = [0.0] * 2 * SIZE
    first, second = Metrics(shared, 0), Metrics(shared, 1)
    for metrics, seconds in ((first, 0.02), (second, 0.02), (second, 7.0), (second, 1e6)):
        metrics.observe(FIRST_TOKEN, seconds)
        metrics.count_request("completions", 200)
    second.count_request("chat", 429)
    second.count_request("chat", 599)
    first.add(ACTIVE, 3)
    text = first.render(EngineLoad(running=2, waiting=1, kv_blocks_used=5, kv_blocks=9), version=4)
    assert text == second.render(EngineLoad(running=2, waiting=1, kv_blocks_used=5, kv_blocks=9), version=4)
    reported = values(text)
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all({name.partition("{")[0], name.partition("{")[0].rpartition("_")[0]} & typed for name in reported)
    assert reported['assay_requests_total{endpoint="completions",status="200"}'] == 4
    assert reported['assay_requests_total{endpoint="chat",status="429"}'] == 1
    assert reported['assay_requests_total{endpoint="chat",status="500"}'] == 1
    name = "assay_time_to_first_token_seconds"
    buckets = {"0.01": 0, "0.025": 2, "5.0": 2, "10.0": 3, "+Inf": 4}
    assert {le: reported[f'{name}_bucket{{le="{le}"}}'] for le in buckets} == buckets
    assert reported[f"{name}_count"] == 4 and reported[f"{name}_sum"] == 1e6 + 7.04
    assert first.active == second.active == reported["assay_active_samples"] == 3
    assert reported["assay_kv_blocks_used"] == 5 and reported["assay_weights_version"] == 4
