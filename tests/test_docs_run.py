"""Commands, settings and fragments of the documentation, each run as a reader would run it: alone, in an empty folder
with the files that the page shows.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_parts import ROOT, block, blocks, command_lines
from stub_endpoint import StubEndpoint, stub_endpoint

from assay.cli.main import main
from assay.runs.rollouts import read_rollouts
from assay.text import char_tokenizer
from assay.types import Finish

SMALL = 'model = {source = "preset:nano", tokenizer = "characters"}\nsampling.max_new_tokens = 8\n'
ONE_STEP = ["--train.steps", "1", "--train.prompts", "2", "--train.samples", "2", "--eval.final_examples", "2"]


def command(page: str, text: str) -> list[str]:
    """The only command of a page that contains the text, without `assay`."""
    calls = [words[1:] for words in command_lines(ROOT / "docs" / page) if words[:1] == ["assay"]]
    (found,) = [words for words in calls if text in " ".join(words)]
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> Path:
    """An empty working directory with the examples of the repository. Runs do not plot their curves."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_settings_of_jsonl_train_on_mapped_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, start in (("train", 0), ("test", 50)):
        rows = [
            {"story": f"{n} eggs.", "query": "How many?", "result": n, "grade": 2} for n in range(start, start + 30)
        ]
        write_rows(folder / "data" / "my_problems" / f"{split}.jsonl", rows)
    (folder / "run.toml").write_text(SMALL + block("guides/data.md", "toml", 'path = "data/my_problems"'))
    assert main(["train", "run.toml", *ONE_STEP]) == 0, capsys.readouterr().err
    (group, _) = read_rollouts(folder / "runs" / "run", 1)
    assert "eggs. How many?\nPut the final answer" in group.prompt.question and group.prompt.fields == {"level": 2}


def is_right(body: dict[str, Any]) -> str:
    """As a model that judges would answer: whether the response ends with the reference answer."""
    reference, response, *_ = body["messages"][0]["content"].splitlines()
    return "Yes." if response.endswith(reference.removeprefix("Reference answer: ")) else "No."


@pytest.fixture
def judge_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubEndpoint]:
    with stub_endpoint(is_right, key="secret") as server:
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        yield server


def test_the_judge_that_asks_a_model_judges_answers_and_passes_the_dry_run(
    folder: Path, judge_server: StubEndpoint, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    """In its own processes, which get only the variables that the settings name."""
    (folder / "llm_judge.py").write_text(block("guides/rewards.md", "python", "# llm_judge.py"))
    settings = block("guides/rewards.md", "toml", "llm_judge.py:reward")
    write_rows(folder / "answers.jsonl", [{"completion": text, "answer": "12"} for text in ("It is 12", "It is 13")])
    names = re.findall(r'"(OPENAI_\w+)"', settings)
    words = ["--reward", "llm_judge.py:reward", "--timeout", "60", *(w for name in names for w in ("--pass-env", name))]
    assert main(["score", "answers.jsonl", *words, "--out", "judged.jsonl"]) == 0, capsys.readouterr().err
    judged = [json.loads(line) for line in (folder / "judged.jsonl").read_text().splitlines()]
    assert [row["verdict"]["reward"] for row in judged] == [1.0, 0.0]
    assert len(judge_server.requests) == 2 and not judge_server.problems
    (folder / "run.toml").write_text(SMALL + 'task = "abacus"\neval.final_examples = 5\n' + settings)
    assert "the judge works: an empty answer is 'wrong'" in stdout_of(main(["train", "run.toml", "--dry-run"]))


ANSWERS = [
    {"completion": "It is \\boxed{50\\%}", "gold": "0.5"},
    {"completion": "So the total is 1,250 .", "gold": "1250"},
    {"completion": "\\boxed{7}", "gold": "7"},
    {"completion": "3 dozen are 36, a third is 12", "gold": "12"},
    {"completion": "\\boxed{9}", "gold": "8"},
    {"completion": "\\boxed{3", "gold": "3"},
]


def test_the_audit_of_a_judge_prints_the_table_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(folder / "answers.jsonl", ANSWERS)
    (folder / "judged.jsonl").write_text("")  # of the command before it on the page
    assert main([*command("guides/rewards.md", "--against lenient"), "--workers", "0"]) == 0
    printed = capsys.readouterr()
    table = block("guides/rewards.md", "text", "disagreements with lenient").splitlines()
    assert [line.rstrip() for line in printed.err.splitlines()][-len(table) :] == table
    summary = json.loads(printed.out)
    assert (summary["n"], summary["same_correctness"], summary["agreement"]) == (6, 3, 0.5)


GAME = """
from assay.envs import Env


class Game:
    def __init__(self, seed):
        self.seed, self.turn = seed, 0

    def play(self, action):
        self.turn += 1
        return f"turn {self.turn}", (action == "go") / 3, self.turn == 3


class Masked(Env):
    name = "masked"

    def reset(self, *, seed=None, options=None):
        self.game = Game(seed)
        return f"game {seed}", {}

    def gold_action(self):
        return "go"

"""


def test_the_fragment_with_masked_turns_leaves_them_out_of_the_loss(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fragment = textwrap.indent(block("guides/environments.md", "python", '"masked": self.game.turn == 1'), "    ")
    (folder / "masked.py").write_text(GAME + fragment)
    assert main(["env", "check", "masked.py:Masked"]) == 0, capsys.readouterr().out
    (folder / "run.toml").write_text(SMALL + 'env = {name = "masked.py:Masked", max_tokens = 2}\n')
    assert main(["train", "run.toml", *ONE_STEP]) == 0, capsys.readouterr().err
    rollouts = [rollout for group in read_rollouts(folder / "runs" / "run", 1) for rollout in group.rollouts]
    assert len(rollouts) == 4 and {len(rollout.turns) for rollout in rollouts} == {3}
    for rollout in rollouts:
        assert [turn.masked for turn in rollout.turns] == [True, False, False]
        trained = sum(len(turn.completion.token_ids) for turn in rollout.turns[1:])
        assert sum(rollout.loss_mask) == trained


class PerfectPlayer:
    """Standard input that answers what the program has printed, until an episode has ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], policy: Callable[[str], str]) -> None:
        self.capsys, self.policy, self.printed = capsys, policy, ""

    def readline(self) -> str:
        self.printed += self.capsys.readouterr().out
        return "" if "--- return" in self.printed else self.policy(self.printed) + "\n"

    def isatty(self) -> bool:
        return False


def next_letter(printed: str) -> str:
    letters = re.findall(r"Say ([a-z ]+) backwards", printed)[-1].split()
    return letters[-1 - printed.count("[reward")]


def next_number(printed: str) -> str:
    return str(int(re.findall(r"\[user\] (\d+)", printed)[-1]) + 1)


@pytest.mark.parametrize(
    ("page", "policy"),
    [("guides/environments.md", next_letter), ("guides/package.md", next_number)],
    ids=["Backwards", "CountUp"],
)
def test_env_play_of_a_page_rewards_a_perfect_player(
    page: str,
    policy: Callable[[str], str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if page == "guides/package.md":
        (folder / "count_up.py").write_text(block(page, "python", "# count_up.py"))
    player = PerfectPlayer(capsys, policy)
    monkeypatch.setattr(sys, "stdin", player)
    assert main(command(page, "env play")) == 0
    assert "--- return: 1 of 1" in player.printed


def test_the_blocks_about_engines_run_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "reference" / "backends.md", "python"):
        if not code.startswith("# "):  # a file of the example, which tests/test_extending.py runs
            exec(code, names)
    assert names["answers"][0].finish in list(Finish) and "sample 1: " in capsys.readouterr().out


def test_the_chat_template_of_models_md_renders_prompts(folder: Path) -> None:
    settings = block("guides/models.md", "toml", "messages")
    (folder / "run.toml").write_text(SMALL + 'task = "abacus"\neval.final_examples = 5\n' + settings)
    assert main(["train", "run.toml", *ONE_STEP, "--eval.examples", "2"]) == 0
    (group, _) = read_rollouts(folder / "runs" / "run", 1)
    prompt = char_tokenizer().decode(group.rollouts[0].turns[0].context_ids)
    assert prompt.startswith("System: Think, then answer.\nUser: ") and prompt.endswith("\nAssistant:")


def test_the_settings_of_curriculum_md_filter_prompts_and_stop_early(folder: Path) -> None:
    parts = blocks(ROOT / "docs" / "guides" / "curriculum.md", "toml")
    (folder / "run.toml").write_text(SMALL + 'task = {name = "abacus", args = {train_size = 4}}\n' + "\n".join(parts))
    words = ["--train.prompts", "2", "--train.samples", "2", "--eval.final_examples", "2"]
    words += ["--eval.every", "1", "--train.stop_early", "1", "--eval.examples", "2"]
    assert main(["train", "run.toml", *words]) == 0
    summary = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    assert summary["steps"] == 2 and "stopped early" in summary["stopped_early"]
    metrics = [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("prompts/within_reach" in row for row in metrics)
