"""Real small runs, a real `assay view` process, and a real browser for the tests of the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns

from assay.runs.rollouts import read_rollouts, write_rollouts
from assay.training.learner.update import Fault, dump_batch
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload='window.hacked = 3'><a href='javascript:window.hacked = 4'>click</a>"
    "javascript:window.hacked=5 \u202etxt.exe\u202c \u0000\u0007\u001b[31m\u200b\u2066x\u2069 &lt;b&gt; ]]> --> \"'"
)
LONG = 100_000  # tokens


TRAIN = """
from assay.cli.main import main
train = ["train", "small.toml", "--task.args", "{train_size = 12, eval_size = 40}", "--train.prompts", "6"]
train += ["--train.samples", "4", "--eval.examples", "20", "--eval.final_examples", "40", "--eval.temperature", "1.0"]
six = [*train, "--train.steps", "6", "--eval.every", "2"]
main(six) or main([*six, "--name", "other", "--seed", "1"])
main([*train, "--train.steps", "8", "--eval.every", "0", "--name", "useless", "--reward.function", "zero.py:reward"])
"""


def python(*words: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, *words]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="session")
def browser_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: small, other, useless (all rewards are equal), hostile, damaged, long (100,000 tokens),
    skipped (a batch that was not trained), repeated (equal answers)."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "zero.py").write_text("def reward(completion, answer):\n    return 0.0\n")
    runs = SmallRuns(folder).runs
    output, _ = python("-c", TRAIN, folder=folder).communicate(timeout=300)
    assert (runs / "useless" / "summary.json").exists(), output
    make_hostile(runs)
    make_damaged(runs)
    make_long(runs)
    make_skipped(runs)
    make_repeated(runs)
    return runs


def make_hostile(runs: Path) -> None:
    """A copy of a run in which every text is hostile."""
    run = runs / "hostile"
    shutil.copytree(runs / "small", run)
    for path in [*run.glob("rollouts/*.jsonl"), *run.glob("evals/*.jsonl")]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["text"] = f"{line['text']} {HOSTILE}"
            line["prompt_id"] = f"{line['prompt_id']} <i>{HOSTILE}</i>"
            line["messages"][0]["content"] += HOSTILE
            line["answer"] = HOSTILE
            line["verdict"] |= {"parsed": HOSTILE, "detail": HOSTILE, "parts": {HOSTILE: 1.0}}
            line["finish"] = "<b>stop</b>"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status = {"state": "failed", "total_steps": 6, "error": HOSTILE}
    (run / "status.json").write_text(json.dumps(status))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('name = "abacus"', f"name = {json.dumps(HOSTILE)}"))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "task": HOSTILE, "model": HOSTILE}))


def make_damaged(runs: Path) -> None:
    run = runs / "damaged"
    shutil.copytree(runs / "small", run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "reward/mean": 0.')
    (run / "rollouts" / "step-000002.jsonl").write_text("not json\n")
    (run / "rollouts" / "step-000003.npz").write_bytes(b"PK\x03\x04 cut off")
    (run / "summary.json").write_text("{")


def make_long(runs: Path) -> None:
    run = runs / "long"
    shutil.copytree(runs / "small", run)
    ids = [number % 50 for number in range(LONG)]
    logprobs = [-(number % 7) / 2 for number in range(LONG)]
    completion = Completion(ids, logprobs, logprobs, Finish.LENGTH, 0)
    prompt = Prompt("long/0", ({"role": "user", "content": "Write a long text."},), "1")
    text = " ".join(str(number) for number in range(20_000))
    rollout = Rollout(prompt, 0, [Turn([1, 2, 3], completion, text)], Verdict(0.0, Status.WRONG))
    write_rollouts(run, 7, [Group(prompt, [rollout])])


def make_skipped(runs: Path) -> None:
    """A run in which the update of step 3 was skipped."""
    run = runs / "skipped"
    shutil.copytree(runs / "small", run)
    dump_batch(run, 3, read_rollouts(run, 3), [Fault(float("nan"), 1.0, [], [])])


def make_repeated(runs: Path) -> None:
    """An interrupted run whose first group has the same answer three times, and another one with a lower reward."""
    run = runs / "repeated"
    shutil.copytree(runs / "small", run)
    shutil.rmtree(run / "evals")
    (run / "summary.json").unlink()
    path = run / "rollouts" / "step-000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        text, reward, status = ("the other end", 0.25, "wrong") if line["sample"] == 1 else ("the end", 1.0, "ok")
        if line["group"] == 0:
            line |= {"text": text, "reward": reward, "verdict": {**line["verdict"], "status": status}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class View:
    """A running `assay view`."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.process = python("-m", "assay", "view", str(runs), "--port", "0", "--no-open", folder=runs.parent)
        line = self.process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, line + self.process.stdout.read()
        self.url = match[0]
        self.base = self.url.partition("/?")[0]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


@pytest.fixture(scope="session")
def view(browser_runs: Path) -> Iterator[View]:
    server = View(browser_runs)
    yield server
    server.stop()


class Tab:
    """A page of the browser that records errors and requests to other hosts."""

    def __init__(self, chromium: Any, server: View, width: int, height: int, **options: Any) -> None:
        self.server = server
        self.context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.expected_statuses: set[int] = set()  # the browser logs answers with these as errors
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self.check_request)
        self.page.on("dialog", lambda dialog: (self.errors.append("dialog"), dialog.dismiss()))
        self.page.goto(server.url)
        self.page.locator("main > *").first.wait_for()

    def check_request(self, request: Any) -> None:
        if not request.url.startswith(self.server.base + "/"):
            self.foreign.append(request.url)

    def open(self, fragment: str) -> Any:
        """Show a view, and wait until it is drawn."""
        self.page.evaluate("fragment => { location.hash = fragment }", fragment)
        drawn = "[...document.querySelectorAll('.chart-plot')].every(plot => plot.childElementCount)"
        self.until(f"history.state?.shown && {drawn}")  # curves are drawn when their width is known
        return self.page

    def until(self, expression: str) -> None:
        """Wait until the expression is true. Playwright's own function uses eval, which the page forbids."""
        for _ in range(400):
            if self.page.evaluate(f"Boolean({expression})"):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"not true: {expression}\n{self.page.url}\n{self.text('body')}")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def close(self) -> None:
        self.context.close()
        expected = [f"status of {status}" for status in self.expected_statuses]
        assert not [error for error in self.errors if not any(part in error for part in expected)]
        assert not self.foreign


@pytest.fixture
def open_tab(chromium: Any, view: View) -> Iterator[Callable[..., Tab]]:
    """Opens tabs; at the end there must be no console error, and no request to another host."""
    tabs: list[Tab] = []

    def open_one(server: View = view, width: int = 1440, height: int = 900, **options: Any) -> Tab:
        tabs.append(Tab(chromium, server, width, height, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    return open_tab()
