"""The page of `assay view` in a real browser, with real runs: what it shows is compared with the files."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pytest

from assay.evals import mcnemar
from assay.runs import Run

if TYPE_CHECKING:
    from conftest import Tab

pytestmark = [pytest.mark.slow, pytest.mark.browser]
BEFORE, AFTER = "step-000000-before-test", "step-000006-after-test"
EVERY_VIEW = [
    *("#/", "#/run/{run}", "#/run/{run}?x=time", "#/run/{run}/prompts", "#/run/{run}/prompts?source=eval"),
    *("#/run/{run}/rollouts", "#/run/{run}/rollouts?source=" + AFTER, "#/run/{run}/rollout/train/1/0"),
    *("#/run/{run}/rollout/" + AFTER + "/6/0", "#/run/{run}/group/1/0", "#/run/{run}/changes?show=all"),
    *("#/run/{run}/story?prompt=abacus/train/0", "#/run/{run}/config", "#/compare?runs={run},other"),
    *("#/?checked={run},other&sort=reward&order=asc", "#/run/{run}/rollouts?sort=reward&order=desc"),
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_lines(run: Path) -> dict[int, list[dict[str, Any]]]:
    return {int(path.stem[5:]): lines_of(path) for path in sorted(run.glob("rollouts/step-*.jsonl"))}


def number(text: str) -> float:
    """A number as the page shows it; for "< 0.0001", the bound."""
    return float(re.sub(r"[<,+%\s]", "", text).replace("\u2212", "-"))


def facts(tab: Tab, selector: str = ".facts") -> dict[str, str]:
    rows = tab.page.locator(f"{selector} > div").evaluate_all(
        "rows => rows.map(row => [row.querySelector('dt').textContent, row.querySelector('dd').firstChild.textContent])"
    )
    return dict(rows)


def rows(tab: Tab, selector: str = "main tbody tr[data-href]") -> list[list[str]]:
    """Texts of the cells of the table, by default without the titles of groups."""
    return tab.page.locator(selector).evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )


def total(tab: Tab) -> int:
    """Number of rows on all pages."""
    return int(number(re.findall(r"of ([\d,]+)", tab.text(".pager .count"))[0]))


# Numbers


def test_the_list_of_runs_shows_the_results_of_each_run(tab: Tab, browser_runs: Path) -> None:
    shown = {row[1].split("\n")[0]: row for row in rows(tab)}
    assert set(shown) == {path.name for path in browser_runs.iterdir()}
    for name in ("small", "other"):
        summary = json.loads((browser_runs / name / "summary.json").read_text())
        reward = [row["reward/mean"] for row in lines_of(browser_runs / name / "metrics.jsonl") if "reward/mean" in row]
        _, _, state, task, algorithm, steps, shown_reward, before, after, *_ = shown[name]
        assert (
            state.split("\n")[0] == "finished"
            and task.split("\n")[0] == summary["task"]
            and algorithm == summary["algorithm"]
        )
        assert steps == f"{summary['steps']} / {summary['steps']}"
        assert number(shown_reward) == pytest.approx(reward[-1], abs=1e-3)
        for text, result in ((before, summary["before"]), (after, summary["after"])):
            accuracy, interval = text.split("\n")
            assert number(accuracy) == pytest.approx(100 * result["accuracy"], abs=0.06)
            bounds = [float(bound) for bound in interval.split("\u2013")]
            assert bounds == pytest.approx([100 * bound for bound in result["ci95"]], abs=0.06)
    tab.page.locator('[data-run="small"] svg path').wait_for()  # the curve of the reward


def test_the_summary_shows_facts_findings_and_curves(tab: Tab, browser_runs: Path) -> None:
    page = tab.open("#/run/small")
    summary = json.loads((browser_runs / "small" / "summary.json").read_text())
    shown = facts(tab)
    assert shown["Steps"] == "6 / 6" and shown["Task"] == "abacus" and shown["Seed"] == "0"
    assert number(shown["Answers sampled"]) == summary["answers"] == 6 * 6 * 4
    plot = page.locator(".interval-plot").get_attribute("aria-label")
    accuracies = [number(text) for text in re.findall(r"[\d.]+\u00a0%", plot)]
    assert accuracies == pytest.approx([100 * summary[key]["accuracy"] for key in ("before", "after")], abs=0.006)
    titles = page.locator(".chart-title").all_inner_texts()
    assert titles[:2] == ["Reward (mean)", "Evaluation accuracy (95 % interval)"] and "Learning rate" in titles
    page.locator(".findings, .healthy").wait_for()
    page.locator(".metric-group summary", has_text="status").click()  # all metrics can be drawn
    page.locator('[data-metric="status/ok"] .curve').wait_for(state="attached")
    page.get_by_role("button", name="Time", exact=True).click()
    chart = page.locator('[data-metric="reward/mean"]')
    chart.locator("svg").focus()
    page.keyboard.press("End")
    last = [row["time/wall"] for row in lines_of(browser_runs / "small" / "metrics.jsonl") if "reward/mean" in row][-1]
    text = chart.locator(".readout-x").inner_text()
    assert text.endswith("seconds") and number(text.split()[0]) == pytest.approx(last, rel=1e-3)


def test_the_crosshair_shows_exact_values(tab: Tab, browser_runs: Path) -> None:
    page = tab.open("#/run/small?smoothing=0")
    metrics = lines_of(browser_runs / "small" / "metrics.jsonl")
    rewards = {row["step"]: row["reward/mean"] for row in metrics if "reward/mean" in row}
    chart = page.locator('[data-metric="reward/mean"]')
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 13, box["y"] + 60)  # the last step
    assert chart.locator(".readout-x").inner_text() == "step 6"
    assert number(chart.locator(".readout-row b").inner_text()) == pytest.approx(rewards[6], rel=1e-5)
    chart.locator("svg").focus()
    page.keyboard.press("Home")
    assert chart.locator(".readout-x").inner_text() == "step 1"
    page.keyboard.press("ArrowRight")
    assert number(chart.locator(".readout-row b").inner_text()) == pytest.approx(rewards[2], rel=1e-5)
    accuracy = page.locator('[data-metric="eval/accuracy"]')
    assert accuracy.locator(".crosshair line").count() == 1  # marks the same step
    accuracy.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert accuracy.locator(".readout-x").inner_text() == "step 2"
    row = next(row for row in metrics if row["step"] == 2 and "eval/accuracy" in row)
    texts = accuracy.locator(".readout-row").first.inner_text()
    shown = [number(text) for text in re.findall(r"[\d.]+\u00a0%", texts)]
    assert shown == pytest.approx([100 * row[f"eval/{key}"] for key in ("accuracy", "low", "high")], abs=0.006)


def test_prompts_have_the_pass_rates_of_the_files(tab: Tab, browser_runs: Path) -> None:
    page = tab.open("#/run/small/prompts")
    verdicts: dict[str, list[bool]] = defaultdict(list)
    steps: dict[str, set[int]] = defaultdict(set)
    for step, lines in train_lines(browser_runs / "small").items():
        for line in lines:
            verdicts[line["prompt_id"]].append(line["verdict"]["status"] == "ok")
            steps[line["prompt_id"]].add(step)
    shown = rows(tab)
    assert len(shown) == len(verdicts) == total(tab)
    for _, prompt_id, seen, rate, *_ in shown:
        expected = verdicts[prompt_id]
        assert number(seen) in (len(expected), len(steps[prompt_id]))
        assert number(rate) == pytest.approx(100 * sum(expected) / len(expected), abs=0.51)
    assert page.locator(".heat rect").count() - 5 == sum(map(len, steps.values()))  # 5: the legend
    rates = [number(row[3]) for row in rows(tab)]
    assert rates == sorted(rates)  # the hardest prompts first
    page.get_by_role("button", name="Pass rate").click()
    tab.until("location.hash.includes('order=desc')")
    page.locator("th[aria-sort=descending]", has_text="Pass rate").wait_for()
    assert [number(row[3]) for row in rows(tab)] == sorted(rates, reverse=True)
    page.get_by_role("button", name="Evaluations").click()
    evaluated = [line["prompt_id"] for path in browser_runs.glob("small/evals/*") for line in lines_of(path)]
    tab.until(f"document.querySelector('.pager .count').innerText.endsWith('of {len(set(evaluated))} prompts')")
    prompt_id = rows(tab)[0][1]
    page.locator(".row-link").first.click()
    tab.until("location.hash.includes('rollouts?') && document.querySelector('.chips')")
    assert total(tab) == evaluated.count(prompt_id) > 1
    tab.open("#/run/small/prompts")
    page.get_by_role("searchbox").fill(shown[0][0][:20])
    tab.until(f"document.querySelectorAll('main tbody tr').length < {len(shown)}")
    assert all(shown[0][0][:20] in row[0] for row in rows(tab))


def test_filters_change_the_list_and_the_address(tab: Tab, browser_runs: Path) -> None:
    page = tab.open("#/run/small/rollouts")
    before = total(tab)
    page.locator(".chip[data-status=ok]").click()
    tab.until("location.hash.includes('status=ok')")
    page.locator(".chip[data-status=ok][aria-pressed=true]").wait_for()
    assert {row[0] for row in rows(tab)} == {"ok"} and total(tab) < before
    page.locator("input[name=step]").fill("2")
    page.keyboard.press("Tab")
    tab.until("location.hash.includes('step=2')")
    tab.until("[...document.querySelectorAll('.group-head')].every(row => row.innerText.startsWith('Step 2,'))")
    ok = sum(line["verdict"]["status"] == "ok" for line in train_lines(browser_runs / "small")[2])
    assert total(tab) == ok == len(rows(tab))
    page.get_by_role("searchbox").fill("no answer has this text")
    page.get_by_text("No rollout matches").wait_for()
    page.get_by_role("button", name="Clear filters").click()
    tab.until("location.hash === '#/run/small/rollouts'")
    page.locator(".pager").wait_for()
    assert total(tab) == before
    page.locator("select[name=source]").select_option(AFTER)
    tab.until("location.hash.includes('source=')")
    tab.until("document.querySelector('.pager .count')?.innerText.includes('of 40')")


def tip(tab: Tab) -> dict[str, str]:
    names, values = (tab.page.locator(f".token-tip {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


def trained_rollout(run: Path) -> tuple[int, int]:
    """Step and index of a rollout with values of the trainer; groups of equal rewards have none."""
    for step, lines in train_lines(run).items():
        with np.load(run / "rollouts" / f"step-{step:06d}.npz") as arrays:
            last = arrays["trainer_logprobs"][arrays["offsets"][1:] - 1]
        for index in range(5, len(lines)):
            if np.isfinite(last[index]) and lines[index]["advantage"] < 0:
                return step, index
    raise AssertionError("no rollout was trained")


def test_tokens_show_the_numbers_of_the_arrays(tab: Tab, browser_runs: Path) -> None:
    step, index = trained_rollout(browser_runs / "small")
    path = browser_runs / "small" / "rollouts" / f"step-{step:06d}.npz"
    with np.load(path) as arrays:
        start, end = arrays["offsets"][index : index + 2]
        part = {name: arrays[name][start:end] for name in arrays.files if len(arrays[name].shape) and name != "offsets"}
        advantage = float(arrays["advantages"][index])
    page = tab.open(f"#/run/small/rollout/train/{step}/{index}")
    tokens = page.locator(".token")
    tokens.last.wait_for()  # the tokenizer may still be loading
    assert not tokens.first.is_visible()  # the prompt is shown once, above
    page.locator("details.segment > summary").click()
    assert tokens.count() == end - start
    sampled = np.flatnonzero(part["loss_mask"])
    for place in (sampled[0], sampled[-1]):
        tokens.nth(int(place)).hover()
        shown = tip(tab)
        engine, trainer = (float(part[name][place]) for name in ("engine_logprobs", "trainer_logprobs"))
        assert shown["id"] == str(part["token_ids"][place]) and shown["loss mask"] == "1, trained"
        assert number(shown["engine log-probability"]) == pytest.approx(engine, rel=1e-8)
        assert number(shown["engine probability"]) == pytest.approx(np.exp(engine), rel=1e-8)
        assert number(shown["trainer log-probability"]) == pytest.approx(trainer, rel=1e-8)
        assert number(shown["trainer / engine ratio"]) == pytest.approx(np.exp(trainer - engine), rel=1e-8)
        assert number(shown["advantage"]) == pytest.approx(advantage, rel=1e-6)
        if "entropies" in part:
            assert number(shown["entropy"]) == pytest.approx(float(part["entropies"][place]), rel=1e-8)
    tokens.nth(0).hover()
    assert "engine log-probability" not in tip(tab) and tip(tab)["loss mask"] == "0, context"
    line = train_lines(browser_runs / "small")[step][index]
    assert line["text"] in re.sub(r" ?<\w+>", "", "".join(tokens.all_text_contents()))  # without special tokens


def test_changes_are_those_of_the_two_evaluations(tab: Tab, browser_runs: Path) -> None:
    lines = [lines_of(browser_runs / "small" / "evals" / f"{name}.jsonl") for name in (BEFORE, AFTER)]
    before, after = (np.array([line["verdict"]["status"] == "ok" for line in part]) for part in lines)
    page = tab.open("#/run/small/changes")
    shown = facts(tab)
    assert number(shown["Gained"]) == (after & ~before).sum() and number(shown["Lost"]) == (before & ~after).sum()
    assert number(shown["Correct in both"]) == (before & after).sum()
    assert number(shown["Wrong in both"]) == (~before & ~after).sum()
    expected = max(mcnemar(before, after).p_value, 1e-4)
    assert number(shown["Paired test, p"]) == pytest.approx(expected, rel=0.06)
    changed = np.flatnonzero(before != after)
    assert page.locator(".pair").count() == min(len(changed), 20)
    first = int(changed[0])
    pair = page.locator(f'.pair[data-prompt="{lines[0][first]["prompt_id"]}"]')
    assert pair.locator(".answer .text").all_inner_texts() == [part[first]["text"] for part in lines]
    page.get_by_role("button", name="Lost").click()
    tab.until("location.hash.includes('show=lost')")
    tab.until(f"document.querySelectorAll('.pair').length === {(before & ~after).sum()}")


def test_runs_are_compared(tab: Tab, browser_runs: Path) -> None:
    page = tab.page
    for name in ("small", "other"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.locator(".settings-table").wait_for()
    table = page.locator(".settings-table tbody tr").all_inner_texts()
    assert [re.split(r"\s+", text.strip()) for text in table] == [
        ["seed", *(["0", "1"] if "small,other" in unquote(page.url) else ["1", "0"])]
    ]
    chart = page.locator('[data-metric="reward/mean"]')
    assert chart.locator(".series").count() == 2
    page.locator(".legend input").first.uncheck()
    assert chart.locator(".series").count() == 1
    lines = [lines_of(browser_runs / name / "evals" / f"{AFTER}.jsonl") for name in ("small", "other")]
    small, other = (np.array([line["verdict"]["status"] == "ok" for line in part]) for part in lines)
    assert {number(facts(tab)[key]) for key in ("Gained", "Lost")} == {(small & ~other).sum(), (other & ~small).sum()}
    expected = max(mcnemar(small, other).p_value, 1e-4)
    assert number(facts(tab)["Paired test, p"]) == pytest.approx(expected, rel=0.06)


# Navigation


def test_reload_restores_every_view(tab: Tab) -> None:
    for fragment in EVERY_VIEW:
        page = tab.open(fragment.format(run="small"))
        tab.until("!document.querySelector('main').innerText.includes('The doctor is examining')")
        if "/compare" in fragment:  # the doctor has examined both runs, whose results have one badge each
            tab.until("document.querySelector('main').innerText.split('1 note').length === 3")
        before, url = tab.text("main"), page.url
        page.reload()
        tab.until(f"document.querySelector('main').innerText === {json.dumps(before)}")
        assert page.url == url


def test_keyboard(tab: Tab) -> None:
    page = tab.page
    names = [row[1].split("\n")[0] for row in rows(tab)]

    def focused() -> str:
        return page.evaluate("document.activeElement.innerText ?? ''")

    page.keyboard.press("j")
    assert focused() == names[0]
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    assert focused() == names[1]
    page.keyboard.press("/")
    page.keyboard.type("small")
    tab.until("document.querySelectorAll('main tbody tr').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".tabs").wait_for()
    assert page.url.endswith("#/run/small")
    page.keyboard.press("3")
    tab.until("location.hash === '#/run/small/rollouts'")
    page.locator(".pager").wait_for()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".token").last.wait_for()
    assert page.url.endswith("/rollout/train/6/0")  # the newest step
    page.keyboard.press("j")
    tab.until("location.hash.endsWith('/rollout/train/6/1')")
    tab.until("document.querySelector('h2').innerText.includes('rollout 1')")
    page.keyboard.press("k")
    tab.until("document.querySelector('h2').innerText.includes('rollout 0')")
    page.locator("details.segment > summary").click()
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert tip(tab)["index"].startswith("2 of")
    page.keyboard.press("End")
    count = page.locator(".token").count()
    assert tip(tab)["index"] == f"{count - 1} of {count}"
    page.keyboard.press("Escape")
    assert page.locator(".token-tip").is_hidden()
    page.keyboard.press("Escape")
    tab.until("location.hash === '#/run/small/rollouts'")
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    assert page.url.endswith("/rollouts")


def test_theme_follows_the_system_and_a_choice_is_remembered(open_tab: Callable[..., Tab]) -> None:
    dark = open_tab(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    colors = dark.page.evaluate(background), open_tab(color_scheme="light").page.evaluate(background)
    assert colors[0] != colors[1]
    dark.page.get_by_role("button", name="Switch to light").click()
    assert dark.page.evaluate(background) == colors[1]
    dark.page.reload()
    assert dark.page.evaluate(background) == colors[1]


def is_as_wide_as_a_phone(page: Any) -> bool:
    return page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]


def test_on_a_phone_no_view_is_too_wide_and_controls_have_names(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(width=390, height=844, is_mobile=True, has_touch=True)
    for fragment in EVERY_VIEW:
        page = tab.open(fragment.format(run="small"))
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, a[href], input, select')]
            .filter(one => !one.textContent?.trim() && !one.getAttribute('aria-label') && !one.labels?.length)
            .map(one => one.outerHTML)"""
        )
        assert nameless == [] and is_as_wide_as_a_phone(page), fragment


# Hostile, damaged, unusual and growing runs


def test_hostile_text_is_only_text_which_fits_on_a_phone(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(width=390, height=844, is_mobile=True, has_touch=True)
    tab.expected_statuses = {400, 404}  # no question in common, or no such run
    for fragment in [*EVERY_VIEW, "#/run/<img src=x onerror=window.hacked=6>", "#/run/%E0%A4%A"]:
        page = tab.open(fragment.format(run="hostile"))
        page.wait_for_timeout(100)
        assert page.evaluate("window.hacked") is None and is_as_wide_as_a_phone(page), fragment
        assert page.locator("main script, main img, main iframe, main a[href^=javascript]").count() == 0, fragment
        links = page.evaluate("[...document.links].map(link => link.href)")
        assert all(link.startswith(tab.server.base) for link in links), fragment
        shown = page.evaluate("document.querySelector('main').innerText")
        hidden = "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u202a-\u202e\u2066-\u2069]"
        assert not re.findall(hidden, shown), fragment
    tab.open("#/run/hostile/group/1/0")
    text = tab.text(".card > .text")
    assert "<script>window.hacked = 1</script>" in text and "&lt;b&gt;" in text
    assert "\u27e8U+202E\u27e9txt.exe" in text and "\u2400\u2407\u241b[31m" in text


def test_damaged_runs_and_missing_views_say_what_cannot_be_shown(tab: Tab) -> None:
    page = tab.open("#/run/damaged")
    problems = page.locator(".problems")
    assert "summary.json" in problems.text_content()
    assert page.locator('[data-metric="reward/mean"] .curve').count() == 1
    tab.open("#/run/damaged/rollouts")
    page.locator(".pager").wait_for()
    assert "step-000002.jsonl" in problems.text_content() and "Step 2," not in tab.text("main table")
    tab.open("#/run/damaged/rollout/train/3/0")
    assert "step-000003.npz" in tab.text("main") and page.locator(".token").count() == 0
    tab.expected_statuses = {404}
    for fragment, text in {
        "#/run/none": "no run",
        "#/run/small/group/1/999": "cannot be shown",
        "#/nothing": "no such view",
        "#/compare?runs=small": "two or more runs",
    }.items():
        tab.open(fragment).get_by_text(text).first.wait_for()


def test_a_long_rollout_does_not_block_the_page(tab: Tab) -> None:
    """The page reacts while its 100,000 tokens are still being added."""
    page = tab.page
    page.evaluate("location.hash = '#/run/long/rollout/train/7/0'")
    page.locator(".action .token").first.wait_for()
    assert page.locator(".token-view[data-complete]").count() == 0
    page.keyboard.press("t")
    tab.until("document.documentElement.dataset.theme")
    assert page.evaluate("document.querySelectorAll('.token').length") < 100_003
    page.locator(".token-view[data-complete]").wait_for(timeout=120_000)
    assert page.evaluate("document.querySelectorAll('.token').length") == 100_003
    page.locator(".token").nth(10).focus()
    page.keyboard.press("End")
    assert tip(tab)["index"] == "100,002 of 100,003"


def test_a_run_that_is_being_written_is_updated(open_tab: Callable[..., Tab], browser_runs: Path) -> None:
    config = (browser_runs / "small" / "config.toml").read_text()
    with Run.create(browser_runs, "growing", config) as run:
        run.log(1, {"reward/mean": 0.25, "time/wall": 1.0})
        tab = open_tab()
        page = tab.open("#/run/growing")
        chart = page.locator('[data-metric="reward/mean"]')
        assert chart.locator(".chart-last").inner_text() == "0.25" and page.locator("#live").is_visible()
        page.evaluate("document.querySelector('[data-metric]').dataset.same = 'yes'")
        run.log(2, {"reward/mean": 0.5, "time/wall": 2.0})
        tab.until("document.querySelector('.chart-last').innerText === '0.5'")
        tab.until("document.querySelector('.facts dd').innerText.startsWith('2 /')")
        assert chart.get_attribute("data-same") == "yes"  # updated, not replaced
    shutil.rmtree(browser_runs / "growing")


def test_a_lost_server_is_reported_and_found_again(open_tab: Callable[..., Tab], browser_runs: Path) -> None:
    tab = open_tab()
    page = tab.open("#/run/small")
    tab.context.set_offline(True)
    page.locator(".tabs a", has_text="Rollouts").click()
    page.get_by_text("The server does not answer").wait_for()
    tab.context.set_offline(False)
    page.locator(".pager").wait_for()  # the view that was asked for
    assert page.locator("#banner").is_hidden()
    tab.errors = [error for error in tab.errors if "ERR_INTERNET_DISCONNECTED" not in error]


def test_other_tokens_are_refused_with_an_explanation(tab: Tab) -> None:
    tab.expected_statuses = {403}
    tab.context.clear_cookies()
    tab.page.evaluate("location.hash = '#/run/small'")
    tab.page.get_by_text("open the address that assay view printed").wait_for()


# Lists that are kept in the address of a rollout


def places(tab: Tab) -> list[tuple[str, int, int]]:
    """Source, step and index of the rows of the table."""
    links = tab.page.locator("main tbody tr[data-href]").evaluate_all("rows => rows.map(row => row.dataset.href)")
    parts = [link.partition("?")[0].split("/")[-3:] for link in links]
    return [(unquote(source), int(step), int(index)) for source, step, index in parts]


def test_next_and_previous_walk_through_the_list_from_which_a_rollout_was_opened(tab: Tab) -> None:
    query = "status=wrong&sort=length&order=desc"
    tab.open(f"#/run/small/rollouts?{query}")
    tab.until("document.querySelectorAll('main tbody tr').length > 5 && !document.querySelector('main [role=status]')")
    listed = places(tab)
    page = tab.page
    page.locator("main tbody tr .row-link").nth(1).click()
    for number in (1, 2, 3):
        source, step, index = listed[number]
        tab.until(f"location.hash.split('?')[0] == '#/run/small/rollout/{source}/{step}/{index}'")
        tab.until(f"document.querySelector('.head .push')?.textContent.startsWith('{number + 1} of ')")
        assert page.url.partition("#")[2].partition("?")[2] == query
        page.keyboard.press("j")
    page.reload()  # the address is enough
    tab.until("document.querySelector('.head .push')?.textContent.startsWith('5 of ')")
    page.get_by_role("link", name="Previous").click()
    source, step, index = listed[3]
    tab.until(f"location.hash.split('?')[0] == '#/run/small/rollout/{source}/{step}/{index}'")
    tab.until("history.state?.shown")
    page.keyboard.press("Escape")  # back to the list
    tab.until("document.querySelector('main tbody tr')")
    assert places(tab) == listed


def test_skipped_batches_are_shown_as_not_trained(tab: Tab, browser_runs: Path) -> None:
    page = tab.open("#/run/skipped")
    page.get_by_role("link", name="Show the skipped rollouts").click()
    tab.until("document.querySelectorAll('main tbody tr[data-href]').length == 24")
    assert page.locator("main tbody .pill", has_text="not trained").count() == 24
    assert "Step 3: an update was skipped, because the loss is not finite." in tab.text(".skipped-note")
    page.locator("main tbody tr .row-link").first.click()
    tab.until("location.hash.startsWith('#/run/skipped/rollout/skipped/3/0')")
    tab.until("document.querySelector('.head .push')?.textContent.startsWith('1 of 24')")
    assert "not trained" in tab.text("main .head:has(h2)") and "the loss is not finite" in tab.text(
        "main .head:has(h2)"
    )
    page.get_by_role("link", name="Compare the group").click()
    tab.until("document.querySelectorAll('.card').length >= 1")
    assert "of 4 answers" in tab.text("main .head:has(h2)")
    assert tab.open("#/run/small").get_by_text("not trained").count() == 0
    assert "skipped" not in tab.open("#/run/small/rollouts").locator("select[name=source]").inner_text()


def test_the_chart_of_results_has_three_to_five_ticks(tab: Tab) -> None:
    tab.open("#/run/small")
    charts = "import('/static/charts.js')"
    bad = tab.page.evaluate(f"""async () => {{
        const {{ intervalPlot }} = await {charts};
        const bad = [];
        for (let low = 0; low < 1; low += 0.037)
          for (let high = low + 0.004; high <= 1; high += 0.029) {{
            const plot = intervalPlot([{{ label: "a", value: (low + high) / 2, low, high }}]);
            const ticks = [...plot.querySelectorAll(".tick")].map((tick) => tick.textContent);
            const at = [...plot.querySelectorAll(".tick")].map((tick) => Number(tick.getAttribute("x")));
            const bar = plot.querySelector(".interval-bar");
            const [begin, end] = ["x1", "x2"].map((name) => Number(bar.getAttribute(name)));
            const inside = at[0] <= begin + 0.01 && at.at(-1) >= end - 0.01;
            const apart = at.slice(1).every((x, index) => x - at[index] > 34);
            if (ticks.length < 3 || ticks.length > 5 || !inside || !apart) bad.push([low, high, ticks]);
          }}
        return bad;
    }}""")
    assert bad == []


# The list, the story of a question, and pictures


def test_the_badge_of_the_doctor_colors_the_state_of_a_run(tab: Tab, browser_runs: Path) -> None:
    """`useless` has finished with equal rewards only: it must not look like a success."""
    row = tab.page.locator("main tbody tr", has=tab.page.get_by_role("link", name="useless", exact=True))
    row.locator(".badge").wait_for()
    findings = json.loads((browser_runs / "useless" / "summary.json").read_text())["diagnosis"]
    assert findings[0]["severity"] in ("error", "warning")
    assert row.locator(".badge").inner_text().split()[1].startswith(findings[0]["severity"])
    assert row.locator(".badge").get_attribute("title") == findings[0]["evidence"]
    assert "good" not in (row.locator(".pill", has_text="finished").get_attribute("class") or "")
    tab.open("#/?sort=state&order=asc")
    tab.until("document.querySelector('main tbody .badge.bad, main tbody .badge.warn')")


def test_columns_of_the_list_sort_and_the_address_keeps_the_order(tab: Tab) -> None:
    page = tab.open("#/")
    page.locator("th button", has_text="After").click()
    tab.until("location.hash.includes('sort=after')")
    accuracies = [number(row[8].split("\n")[0]) for row in rows(tab) if row[8]]
    assert len(accuracies) > 2 and accuracies == sorted(accuracies, reverse=True)
    assert rows(tab)[-1][8] == ""  # damaged: no summary
    page.locator("th button", has_text="After").click()
    page.locator("th[aria-sort=ascending]", has_text="After").wait_for()
    page.reload()
    page.locator("th[aria-sort=ascending]", has_text="After").wait_for()
    assert [number(row[8].split("\n")[0]) for row in rows(tab) if row[8]] == accuracies[::-1]


def test_checked_runs_are_drawn_above_the_list_on_one_scale(tab: Tab) -> None:
    page = tab.open("#/")
    assert page.locator("figure.chart").count() == 0
    for name in ("small", "other"):
        page.get_by_label(f"Compare {name}", exact=True).check()
    tab.until("document.querySelectorAll('figure.chart .series').length == 2")
    assert page.locator("figure.chart .legend li").all_inner_texts() == ["small", "other"]
    page.reload()
    tab.until("document.querySelectorAll('figure.chart .series').length == 2")
    tab.until("document.querySelectorAll('[data-run] svg path').length > 3")
    page.get_by_label("Compare other", exact=True).uncheck()
    tab.until("document.querySelectorAll('figure.chart .series').length == 1")
    # Curves of equal values have equal heights in all rows, whatever the range of the run is.
    end = "name => document.querySelector(`[data-run=${name}] circle`).getAttribute('cy')"
    last = {row[1].split("\n")[0]: row[6] for row in rows(tab)}
    by_reward = sorted(("small", "other", "useless"), key=lambda name: number(last[name]))
    heights = [float(page.evaluate(end, name)) for name in by_reward]
    assert heights == sorted(heights, reverse=True) and heights[0] == pytest.approx(21)  # 0 is the bottom


def test_rollouts_show_their_question_and_its_pass_rate_newest_first(tab: Tab, browser_runs: Path) -> None:
    tab.open("#/run/small/rollouts")
    tab.until("document.querySelectorAll('.group-head').length > 2")
    lines = train_lines(browser_runs / "small")[6]
    heads = tab.page.locator(".group-head").all_inner_texts()
    for number_of, head in enumerate(heads[:6]):
        group = [line for line in lines if line["group"] == number_of]
        correct = sum(line["verdict"]["status"] == "ok" for line in group)
        assert f"Step 6, group {number_of}" in head and group[0]["messages"][-1]["content"] in head
        assert f"{correct} of {len(group)} correct" in head
    headings = tab.page.locator("main th").all_inner_texts()
    assert "Answer" in headings and "Turns" not in headings  # all have one turn
    tab.open("#/run/small/rollouts?sort=length&order=desc")
    tab.page.locator("td .question-line").first.wait_for()


def test_a_group_has_each_answer_once_and_marks_where_it_differs(tab: Tab, browser_runs: Path) -> None:
    run = browser_runs / "repeated"
    page = tab.open("#/run/repeated/group/1/0")
    tab.until("document.querySelector('.card mark')")
    lines = [line for line in train_lines(run)[1] if line["group"] == 0]
    cards = page.locator(".card")
    assert cards.count() == len({line["text"] for line in lines}) == 2
    assert cards.first.locator(".pill").first.inner_text() == f"\u00d7{len(lines) - 1}"
    rewards = [number(re.findall(r"reward (\S+)", text)[0]) for text in page.locator(".card footer").all_inner_texts()]
    assert rewards == sorted(rewards, reverse=True)
    assert cards.first.locator("mark").count() == 0 and cards.nth(1).locator("mark").inner_text().strip() == "other"


def test_the_learning_story_highlights_the_first_correct_answer(tab: Tab, browser_runs: Path) -> None:
    seen: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for step, lines in train_lines(browser_runs / "small").items():
        for prompt in {line["prompt_id"] for line in lines}:
            verdicts = [line["verdict"]["status"] == "ok" for line in lines if line["prompt_id"] == prompt]
            seen[prompt].append((step, sum(verdicts), len(verdicts)))
    prompt, times = next((p, t) for p, t in seen.items() if len(t) > 2 and any(c for _, c, _ in t) and not t[0][1])
    first = next(step for step, correct, _ in times if correct)
    page = tab.open("#/run/small/prompts")
    page.get_by_role("searchbox").fill(prompt)
    tab.until(f"document.querySelector('.strip')?.href.endsWith({json.dumps(prompt)})")
    page.locator(".strip").first.click()
    page.locator(".story .card").first.wait_for()
    assert page.locator(".story .card").count() == len(times) == page.locator(".time").count()
    card = page.locator(".first-correct")
    assert card.count() == 1 and card.locator(".row-link").inner_text() == f"step {first}"
    assert card.locator(".pill").first.inner_text() == "ok" and card.locator("mark").count() > 0
    before = page.locator(".story .card").count()
    page.locator(".time").first.click()
    tab.until(f"document.querySelectorAll('.story .card').length == {before - 1}")
    shown = tab.text(".story")
    page.reload()  # the address has everything
    page.locator(".story .card").first.wait_for()
    assert tab.text(".story") == shown and "at=" in page.url


def test_solved_prompts_over_time_are_those_of_the_files(tab: Tab, browser_runs: Path) -> None:
    tab.open("#/run/small/prompts")
    label = tab.page.locator(".bars").get_attribute("aria-label") or ""
    for step, lines in train_lines(browser_runs / "small").items():
        shares = [
            np.mean([line["verdict"]["status"] == "ok" for line in lines if line["group"] == group])
            for group in range(6)
        ]
        always, never = shares.count(1.0), shares.count(0.0)
        assert f"step {step}: {always} always solved, {6 - always - never} sometimes, {never} never" in label


def test_a_chart_is_saved_as_a_picture(tab: Tab) -> None:
    page = tab.open("#/run/small")
    for button in ('[data-metric="eval/accuracy"] .save', ".panel:has(.interval-plot) .save"):
        with page.expect_download() as download:
            page.locator(button).click()
        content = Path(download.value.path()).read_bytes()
        assert download.value.suggested_filename.endswith(".png") and content.startswith(b"\x89PNG")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert width > 600 and height > 200 and len(content) > 5_000  # twice the size of the page; not empty


def test_the_summary_shows_two_new_answers_and_no_panel_of_zeros(tab: Tab, browser_runs: Path) -> None:
    page = tab.open("#/run/small")
    page.locator(".sample").first.wait_for()
    questions = {line["messages"][-1]["content"] for line in train_lines(browser_runs / "small")[6]}
    assert {text.split("\n")[0] for text in page.locator(".sample").all_inner_texts()} <= questions
    assert page.locator(".sample").count() == 2
    page.locator('[data-metric="eval/accuracy"] .legend', has_text="before").wait_for()
    metrics = [row for row in lines_of(browser_runs / "small" / "metrics.jsonl") if "reward/mean" in row]
    zero = [name for name in ("length/truncated", "optim/grad_norm") if not any(row.get(name) for row in metrics)]
    titles = page.locator("main > .stack > .charts figure").evaluate_all("all => all.map(one => one.dataset.metric)")
    assert "reward/mean" in titles and not set(titles) & set(zero)


def test_a_run_in_progress_shows_when_it_ends(open_tab: Callable[..., Tab], browser_runs: Path) -> None:
    config = (browser_runs / "small" / "config.toml").read_text()
    with Run.create(browser_runs, "timed", config) as run:
        run.write_status("running", 103)
        for step, seconds in enumerate((90.0, 30.0, 30.0), start=1):
            run.log(step, {"reward/mean": 0.25, "time/wall": 1.0, "time/step": seconds, "time/tokens_per_s": 1234.5})
        tab = open_tab()
        tab.open("#/run/timed")
        shown = facts(tab)
        assert shown["Remaining"] == "50 min left" and shown["Tokens per second"] == "1,235"
        tab.open("#/")
        row = tab.page.locator("main tbody tr", has=tab.page.get_by_role("link", name="timed", exact=True))
        assert row.locator(".eta").inner_text() == "50 min left"
    shutil.rmtree(browser_runs / "timed")


def test_settings_that_were_changed_come_first(tab: Tab) -> None:
    page = tab.open("#/run/small/config")
    titles = page.locator("main > .panel h2").all_inner_texts()
    assert titles.index("Changed settings") < titles.index("All settings")
    changed = dict(row[:2] for row in rows(tab, ".panel:has(h2:text-is('Changed settings')) tbody tr"))
    assert changed["sampling.max_new_tokens"] == "8" and "seed" not in changed


def test_comparisons_say_why_there_is_no_paired_test(tab: Tab) -> None:
    tab.expected_statuses = {400}
    page = tab.open("#/compare?runs=small,other")
    text = tab.text("main")
    assert text.index("Settings that differ") < text.index("Curves")
    assert "From small: after" in tab.text(".pair-about") and "to other: after" in tab.text(".pair-about")
    tab.open("#/compare?runs=small,repeated")
    page.get_by_text("repeated (", exact=False).get_by_text("has no evaluation").first.wait_for()


def test_on_a_phone_the_active_tab_is_visible_and_filters_are_folded(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(width=390, height=844, is_mobile=True, has_touch=True)
    for part in ("changes", "config"):
        page = tab.open(f"#/run/small/{part}")
        tab.until("document.querySelector('.tabs')?.scrollLeft > 0")
        box = page.locator(".tabs [aria-current]").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390, part
    tab.open("#/run/small/rollouts")
    assert not page.locator("select[name=source]").is_visible()
    page.get_by_text("Filters and order").click()
    page.locator("select[name=source]").wait_for()
    clipped = page.evaluate(
        "[...document.querySelectorAll('input')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
    )
    assert clipped == 0


def test_tokens_of_a_confident_model_are_colored_by_advantage_and_turns_have_rewards(tab: Tab) -> None:
    shown = tab.page.evaluate("""async () => {
        const { tokenView } = await import("/static/tokens.js");
        const tokensOf = (logprob) => ({
          text: ["ask", "a", "b", "see", "c"], ids: [1, 2, 3, 4, 5], mask: [0, 1, 1, 0, 1], sampled: [0, 1, 1, 0, 1],
          engine_logprobs: [null, logprob, -0.01, null, -0.02], advantages: [null, 0.5, 0.5, null, 0.5],
        });
        const strength = (token) => parseFloat(token.style.getPropertyValue("--strength"));
        const turns = ["context", "action", "context", "action"].map((role, index) => ({ role, reward: index }));
        const views = [-0.05, -0.4].map((logprob) => tokenView(tokensOf(logprob), { turns }));
        return views.map((view) => ({
          coloring: view.dataset.coloring,
          scale: view.querySelector(".token-scale").textContent,
          titles: [...view.querySelectorAll(".segment-title")].map((title) => title.textContent),
          strongest: Math.max(...[...view.querySelectorAll(".token")].map(strength)),
        }));
    }""")
    assert [view["coloring"] for view in shown] == ["advantage", "engine"]
    assert shown[1]["scale"].startswith("0\u22120.4 nats") and shown[1]["strongest"] == 90  # the scale of this answer
    assert shown[0]["titles"] == [
        *("Prompt \u00b7 1 token", "Turn 1, sampled \u00b7 2 tokens \u00b7 reward 1"),
        *("Observation \u00b7 1 token", "Turn 2, sampled \u00b7 1 token \u00b7 reward 3"),
    ]


def test_differences_between_answers_are_found(tab: Tab) -> None:
    found = tab.page.evaluate("""async () => {
        const { firstDifference, newPieces, piecesOf } = await import("/static/diff.js");
        const words = (text) => piecesOf({ text });
        const marked = (text, before) => {
          const isNew = newPieces(words(text), words(before));
          return words(text).filter((_, at) => isNew[at]);
        };
        return [
          words("6 + 3 = 9;\\n#### 9").join(""),
          marked("2 + 8 = 10 ; #### 10", "2 + 8 = 0 ; #### 0"),
          marked("same", "same"),
          marked("a b c d", "a d"),
          marked("a", "a b c"),
          firstDifference(words("a b x"), words("a b c")),
          firstDifference(words("a b"), words("a b c")),
        ];
    }""")
    assert found == ["6 + 3 = 9;\n#### 9", [" 10", " 10"], [], [" b", " c"], [], 2, 2]
