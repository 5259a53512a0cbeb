"""A report in a real browser, from file://: curves, tokens, hostile text, both themes, a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from web_parts import answer, prompt_of, standard_run

from assay.runs import write_rollouts
from assay.types import Group, Status
from assay.web.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.browser]
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\u2028\u202e\x00"
    "<svg onload='window.hacked = 3'>"
)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    run = standard_run(tmp_path)
    prompt = prompt_of("hostile", HOSTILE)
    write_rollouts(run, 4, [Group(prompt, [answer(prompt, n, HOSTILE, Status.UNPARSABLE) for n in range(2)])])
    file = tmp_path / "report.html"
    file.write_text(write_report(run)[0])
    return file


@pytest.mark.parametrize(("theme", "width"), [("light", 1200), ("dark", 390)])
def test_a_report_opens_without_a_server(chromium: Any, report: Path, theme: str, width: int) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=theme, offline=True)
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#curves svg").count() >= 1 and page.locator("#curves path.curve").first.get_attribute("d")
    assert page.locator("details.sample[open]").count() == 2  # a question gained, and an answer token by token
    page.locator("details.sample[open] .action .token").first.wait_for()
    for sample in page.locator("details").all():
        sample.evaluate("details => { details.open = true }")
    tokens = page.locator("[data-tokens] .token")
    tokens.last.hover()
    assert "engine log-probability" in page.locator(".token-tip:visible").inner_text()
    assert page.evaluate("window.hacked") is None and page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "<img src=x" in page.locator("main").inner_text()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert said == [] and requests == [report.as_uri()]
    page.close()


def test_without_scripts_everything_but_curves_is_readable(chromium: Any, report: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    text = page.locator("main").inner_text()
    assert (
        "Curves need JavaScript." in text and "1 gained, 1 lost" in text and "Findings" in text and "Settings" in text
    )
    context.close()
