"""Parts of the HTML of a report."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from assay.runs.reading import default_settings
from assay.web.report_html import ReportContent, accuracy, accuracy_intervals, page, shown


def test_text_is_escaped_and_control_characters_are_visible() -> None:
    assert shown("<b> & \"x\" 'y'") == "&lt;b&gt; &amp; &quot;x&quot; &#x27;y&#x27;"
    assert shown("a\x1b[31m\u202eb") == "a␛[31m\\u202eb" and shown("\ud800") == "\ufffd" and shown(None) == ""


def test_accuracies_have_their_interval_and_number_of_questions() -> None:
    value, notes = accuracy({"accuracy": 0.915, "ci95": [0.9, 0.93], "n": 500})
    assert value == "91.5 %"
    assert [note.replace("\u00a0", " ") for note in notes] == ["95 % interval 90.0 to 93.0 %", "500 questions"]
    assert accuracy({"accuracy": 0.5}) == ("50.0 %", []) and accuracy(["x"]) == ("–", [])
    rows = accuracy_intervals({"before": {"accuracy": 0.25, "ci95": [0.2, 0.3]}, "after": None})
    assert rows == [{"label": "before", "value": 0.25, "low": 0.2, "high": 0.3}]


def page_of(findings: Sequence[Mapping[str, Any]] = (), toml: str = "", **detail: Any) -> str:
    """The page of a run, without the style, script and data that belong to it."""
    content = ReportContent({"name": "mine", **detail}, findings, None, [], toml)
    return page(content, [], shortened=False, policy="", style="", data="", script="")


def test_only_settings_that_differ_from_defaults_are_in_the_table() -> None:
    config = {"seed": 7, "optim": {"lr": default_settings()["optim.lr"], "betas": [0.9, 0.5]}, "own": "<x>"}
    _, _, text = page_of(config=config, toml="seed = 7").partition("<h2>Settings")
    table, _, whole = text.partition("<details")
    assert "seed" in table and "optim.betas" in table and "&lt;x&gt;" in table and "optim.lr" not in table
    assert str(default_settings()["optim.betas"]) in table
    assert "seed = 7" in whole
    assert "All settings have their defaults" in page_of(config={"seed": default_settings()["seed"]})
    assert "<h2>Settings" not in page_of()


def test_the_command_can_be_copied() -> None:
    known = {
        "command": ["/opt/bin/assay", "train", "my config.toml"],
        "folder": "/home/x",
        "git": {"commit": "abc", "dirty": True},
    }
    text = html.unescape(page_of(environment=known))
    assert "assay train 'my config.toml'" in text and "at the git commit abc, with changes" in text
    assert "assay train config.toml" in page_of()


def test_findings_show_their_severity_evidence_remedy_and_examples() -> None:
    cause = {"name": "x", "severity": "error", "evidence": "it is <bad>", "remedy": "stop", "examples": ("one & two",)}
    text = page_of([cause])
    assert 'class="finding error"' in text and "it is &lt;bad&gt;" in text and "one &amp; two" in text
    assert "nothing wrong" in page_of()


def test_versions_and_machine_are_listed() -> None:
    known = {"versions": {"torch": "2.9"}, "machine": {"gpus": ["A", "B"], "cores": None}, "resumed": [{}, {}]}
    _, _, text = page_of(environment=known).partition("<h2>Versions")
    assert "2.9" in text and "A, B" in text and "2 times" in text and "cores" not in text
