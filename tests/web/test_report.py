"""`assay report`: one file with everything, that no text can break out of."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from web_parts import HOSTILE, answer, group_of, make_run, prompt_of, standard_run

from assay.runs import Run, write_rollouts
from assay.runs.directory import default_settings
from assay.types import Finish, Group, Status
from assay.web.data import RunView
from assay.web.report import (
    MAX_BYTES,
    ReportLimits,
    cut,
    digest,
    json_block,
    page,
    paired_facts,
    select_samples,
    shortened_tokens,
    shown,
    write_report,
)

BREAKOUT = "</script><script>alert(1)</script><!-- \u2028 \u2029 ]]> </style> &lt; &amp;"


class Elements(HTMLParser):
    """Elements, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.tags[-1] if self.tags else "", []).append(data)

    @property
    def text(self) -> str:
        return " ".join(part for tag, parts in self.texts.items() if tag not in ("script", "style") for part in parts)


def with_text(runs: Path, text: str) -> Path:
    """A run in which every text is the given one."""
    path = make_run(runs, steps=2)
    prompt = prompt_of(text or "x", text)
    answers = [answer(prompt, n, text, status, detail=text) for n, status in enumerate((Status.OK, Status.UNPARSABLE))]
    write_rollouts(path, 1, [Group(prompt, answers)])
    for step, label, status in ((0, "before", Status.WRONG), (2, "after", Status.OK)):
        write_rollouts(path, step, [Group(prompt, [answer(prompt, 0, text, status)])], "eval", split=f"{label}-test")
    (path / "summary.json").write_text(json.dumps({"task": text, "model": text, "after": {"accuracy": 0.5}}))
    (path / "environment.json").write_text(json.dumps({"command": ["assay", text], "machine": {"host": text}}))
    return path


def test_the_file_contains_everything_and_refers_to_nothing(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    page, shortened = write_report(path)
    elements = Elements(page)
    assert not shortened and len(page) < 300_000
    for part in ("Summary", "Findings", "Curves", "Questions gained", "Best answers", "Repeat it", "Settings"):
        assert part in elements.texts["h2"]
    assert "1 gained, 1 lost" in elements.text and "what is q1?" in elements.text and "preset:nano" in elements.text
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & set(elements.tags)
    assert not [one for one in elements.attributes if one[1] in ("src", "href", "style") or one[1].startswith("on")]
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert data["metrics"]["step"]["series"]["reward/mean"] == {"x": [1, 2, 3], "y": [0.25, 0.5, 0.75]}


def test_credentials_in_urls_of_the_settings_and_the_command_are_not_shown(tmp_path: Path) -> None:
    path, url = standard_run(tmp_path), "http://user:pa55word@host:1/v1?api_key=s3cret"
    with open(path / "config.toml", "a") as file:
        file.write(f'\n[server]\nurls = ["{url}"]\n')
    (path / "environment.json").write_text(json.dumps({"command": ["assay", "train", f"--server.urls={url}"]}))
    page, _ = write_report(path)
    assert "http://***@host:1/v1?***" in page and "pa55word" not in page and "s3cret" not in page


def test_the_policy_allows_the_script_and_the_style_of_the_file_only(tmp_path: Path) -> None:
    page, _ = write_report(standard_run(tmp_path))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]  # type: ignore[index]
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]  # type: ignore[index]
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]  # type: ignore[index]
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert not re.search(r"^\s*(?:import|export)\b", script, re.MULTILINE) and "const { element } = dom;" in script
    assert f"script-src '{digest(script)}'" in policy and f"style-src '{digest(style)}'" in policy


@pytest.mark.parametrize("text", ["\n".join(HOSTILE), BREAKOUT, "a" * 20_000, "\n" * 3000, ""])
def test_no_text_of_a_run_becomes_markup(tmp_path: Path, text: str) -> None:
    page, _ = write_report(with_text(tmp_path, text))
    elements = Elements(page)
    assert elements.tags.count("script") == 2 and elements.tags.count("style") == 1
    assert not {"img", "svg", "b", "textarea"} & set(elements.tags)
    assert not [one for one in elements.attributes if one[1].startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page)
    if text == BREAKOUT:
        assert elements.text.count("<script>alert(1)</script>") >= 4
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    page.encode()
    assert len(data["tokens"]) == 5


def test_json_cannot_end_its_block() -> None:
    text = json_block({"x": BREAKOUT, "nan": float("nan"), "deep": [{"</script>": "<!--"}]})
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert json.loads(text) == {"x": BREAKOUT, "nan": None, "deep": [{"</script>": "<!--"}]}


def test_a_huge_run_fits_into_three_megabytes(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    with Run.open(path, write=True) as run:
        for step in range(1, 1501):
            run.log(step, dict.fromkeys(("reward/mean", "length/mean", "policy/entropy", "optim/lr"), step / 7))
    text = "<&>" * 2000  # four or more bytes per character
    prompts = [replace(prompt_of(f"p{n}"), messages=({"role": "user", "content": text},) * 8) for n in range(8)]
    write_rollouts(
        path, 1, [Group(p, [answer(p, n, text, Status.UNPARSABLE, advantage=n) for n in range(2)]) for p in prompts]
    )
    for step, label, status in ((0, "before", Status.WRONG), (2, "after", Status.OK)):
        groups = [Group(prompt, [answer(prompt, 0, text, status)]) for prompt in prompts]
        write_rollouts(path, step, groups, "eval", split=f"{label}-test")
    (path / "config.toml").write_text("".join(f'key{n} = "{"x" * 5000}"\n' for n in range(200)))
    page, shortened = write_report(path)
    assert len(page.encode()) < MAX_BYTES == 3_000_000 and shortened
    assert "Samples were shortened" in page and "characters left out" in page
    assert "empty" in Elements(write_report(make_run(tmp_path, "empty"))[0]).texts["h1"][0]


STRANGE = {"after": ["x"], "before": {"accuracy": "?", "ci95": 3, "n": "many"}, "answers": [], "paired": 1}
DOCUMENTS = ("summary.json", "environment.json", "status.json")


@pytest.mark.parametrize(
    ("names", "content", "told"),
    [
        (["config.toml"], None, "config.toml"),
        (["rollouts/step-000002.jsonl"], '{"half', "step-000002.jsonl"),
        (["rollouts/step-000003.npz"], "no arrays", "step-000003.npz"),
        (["metrics.jsonl"], '{"step": "x"}\nnonsense\n{"step": 1, "reward/mean": 0.5}\n', "metrics.jsonl"),
        (DOCUMENTS, '{"after": ["x"], "command": 5, "versions": [], "before": {"accuracy": "?"', "summary.json"),
        (DOCUMENTS, json.dumps({**STRANGE, "command": [1], "versions": [2], "git": {"commit": {}}}), ""),
    ],
)
def test_a_damaged_run_shows_what_can_be_read(
    tmp_path: Path, names: Sequence[str], content: str | None, told: str
) -> None:
    path = standard_run(tmp_path)
    for name in names:
        (path / name).unlink(missing_ok=True) if content is None else (path / name).write_text(content)
    elements = Elements(write_report(path)[0])
    assert "Best answers" in elements.texts["h2"] and "what is p1?" in elements.text
    assert not told or ("cannot be read." in elements.text and told in elements.text)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_and_links_that_lead_out_of_the_run_are_not_read(tmp_path: Path, kind: str) -> None:
    path = standard_run(tmp_path)
    shutil.rmtree(path / "evals")
    (path / "metrics.jsonl").rename(tmp_path / "outside.jsonl")
    if kind == "pipe":
        os.mkfifo(path / "metrics.jsonl")
    else:
        (path / "metrics.jsonl").symlink_to(tmp_path / "outside.jsonl")
    elements = Elements(write_report(path)[0])
    assert "metrics.jsonl is" in elements.text
    assert "Best answers" in elements.texts["h2"]


# Parts of the page


def test_text_is_escaped_and_control_characters_are_visible() -> None:
    assert shown("<b> & \"x\" 'y'") == "&lt;b&gt; &amp; &quot;x&quot; &#x27;y&#x27;"
    assert shown("a\x1b[31m\u202eb") == "a␛[31m\\u202eb" and shown("\ud800") == "\ufffd" and shown(None) == ""


def page_of(findings: Sequence[Mapping[str, Any]] = (), toml: str = "", **detail: Any) -> str:
    """The page of a run, without the style, script and data that belong to it."""
    return page({"name": "mine", "findings": findings, **detail}, toml=toml)


def test_command_findings_versions_and_machine() -> None:
    known = {"command": ["/opt/bin/assay", "train", "my config.toml"], "git": {"commit": "abc", "dirty": True}}
    known |= {"versions": {"torch": "2.9"}, "machine": {"gpus": ["A", "B"], "cores": None}, "resumed": [{}, {}]}
    cause = {"name": "x", "severity": "error", "evidence": "it is <bad>", "remedy": "stop", "examples": ("one & two",)}
    text = page_of([cause], environment=known)
    assert 'class="finding error"' in text and "it is &lt;bad&gt;" in text and "one &amp; two" in text
    assert "assay train 'my config.toml'" in html.unescape(text) and "at the git commit abc, with changes" in text
    _, _, listed = text.partition("<h2>Versions")
    assert "2.9" in listed and "A, B" in listed and "2 times" in listed and "cores" not in listed
    assert "assay train config.toml" in page_of() and "nothing wrong" in page_of()


def test_only_settings_that_differ_from_defaults_are_in_the_table() -> None:
    config = {"seed": 7, "optim": {"lr": default_settings()["optim.lr"], "betas": [0.9, 0.5]}, "own": "<x>"}
    _, _, text = page_of(config=config, toml="seed = 7").partition("<h2>Settings")
    table, _, whole = text.partition("<details")
    assert "seed" in table and "optim.betas" in table and "&lt;x&gt;" in table and "optim.lr" not in table
    assert str(default_settings()["optim.betas"]) in table
    assert "seed = 7" in whole
    assert "All settings have their defaults" in page_of(config={"seed": default_settings()["seed"]})
    assert "<h2>Settings" not in page_of()


# Rollouts that the report shows: which ones, and how they are shortened


def test_every_kind_of_sample_is_found_with_its_number(tmp_path: Path) -> None:
    path = standard_run(tmp_path)
    prompt = prompt_of("p9")
    long = answer(prompt, 0, "and so on", Status.NO_ANSWER, finish=Finish.LENGTH, reward=0.25)
    write_rollouts(path, 4, [Group(prompt, [long, answer(prompt, 1, "right", Status.OK)])])
    found, problems = select_samples(RunView("one", path), ReportLimits())
    kinds = {kind.title: kind for kind in found}
    assert list(kinds) == [
        "Questions gained", "Questions lost", "Best answers", "Worst answers", "Cut off", "Without a readable answer",
    ] and problems == []  # fmt: skip
    assert [one["prompt_id"] for one in kinds["Questions gained"].pairs] == ["q1"]
    assert kinds["Questions lost"].pairs[0]["b"]["text"] == "after 0"
    assert [one["text"] for one in kinds["Best answers"].rollouts] == ["right", "and so on"]
    assert [one["text"] for one in kinds["Worst answers"].rollouts] == ["and so on", "right"]
    assert [one["text"] for one in kinds["Cut off"].rollouts] == ["and so on"] and kinds["Cut off"].total == 1
    assert [one["step"] for one in kinds["Without a readable answer"].rollouts] == [4, 1]
    assert all(kind.rollouts[0]["tokens"]["ids"] for kind in found[2:])
    facts = paired_facts(RunView("one", path))
    assert facts is not None and (facts["gained"], facts["lost"], facts["questions"]) == (["q1"], ["q0"], 2)
    assert paired_facts(RunView("other", make_run(tmp_path, "other"))) is None


def test_of_many_equal_rewards_the_most_unusual_answers_are_chosen(tmp_path: Path) -> None:
    path = make_run(tmp_path, steps=1)
    groups = [
        Group(prompt, [answer(prompt, 0, f"text {n}", Status.OK, advantage=n / 100)])
        for n in range(100)
        for prompt in [prompt_of(f"p{n}")]
    ]
    write_rollouts(path, 1, groups)
    best, worst = select_samples(RunView("one", path), ReportLimits(samples=2))[0]
    assert [one["text"] for one in best.rollouts] == ["text 99", "text 98"]
    assert [one["text"] for one in worst.rollouts] == ["text 0", "text 1"]


def test_a_run_without_rollouts_of_training_shows_its_last_evaluation(tmp_path: Path) -> None:
    path = make_run(tmp_path, steps=1)
    write_rollouts(path, 1, [group_of("q1", ["no_answer"])], "eval", split="after-test")
    found, _ = select_samples(RunView("one", path), ReportLimits())
    assert [kind.title for kind in found] == ["Best answers", "Worst answers", "Without a readable answer"]
    assert "the evaluation step-000001-after-test" in found[0].about and found[0].rollouts[0]["tokens"] is None


def test_long_texts_and_tokens_are_cut_and_say_so() -> None:
    assert (
        cut("0123456789", 4) == "01\n[... 6 characters left out ...]\n89"
        and cut("abc", 3) == "abc"
        and cut(None, 3) == ""
    )
    tokens = {"ids": [1, 2, 3], "text": None, "mask": [0, 1, 1], "engine_logprobs": [None, -0.123456789, -1.0]}
    short = shortened_tokens(tokens, 2)
    assert short["ids"] == [1, 2] and short["engine_logprobs"] == [None, -0.12346] and short["total"] == 3
    assert short["text"] is None
