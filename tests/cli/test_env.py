"""`assay env`: check and play environments."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from assay.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def typed(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    remaining: Iterator[str] = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)


def test_the_example_environment_is_short_and_passes_the_check(
    monkeypatch: pytest.MonkeyPatch, stdout_of: Callable[..., str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert len((ROOT / "examples" / "my_env.py").read_text().splitlines()) < 40
    assert "FAIL" not in stdout_of(main(["env", "check", "examples/my_env.py:Backwards"]))


def test_the_documented_environment_is_the_example() -> None:
    page = (ROOT / "docs" / "guides" / "environments.md").read_text()
    code = (ROOT / "examples" / "my_env.py").read_text()
    assert code[code.index("import random") :].strip() in page


def test_a_broken_environment_fails_the_check(
    tmp_path: Path, stdout_of: Callable[..., str], stderr_of: Callable[..., str]
) -> None:
    (tmp_path / "bad.py").write_text(
        "import random\nfrom assay.envs import Env\nclass Bad(Env):\n"
        "    def reset(self, *, seed=None, options=None):\n        return str(random.random()), {}\n"
        "    def step(self, action):\n        return '', 0.0, True, False, {}\n"
    )
    assert "FAIL" in stdout_of(main(["env", "check", f"{tmp_path}/bad.py:Bad"]), 1)
    found = json.loads(stdout_of(main(["env", "check", f"{tmp_path}/bad.py:Bad", "--json"]), 1))
    assert not found["ok"] and 0 < sum(bool(check["problem"]) for check in found["checks"]) < len(found["checks"])
    assert "unknown environment" in stderr_of(main(["env", "check", "nothing"]))


def test_play_an_episode(monkeypatch: pytest.MonkeyPatch, stdout_of: Callable[..., str]) -> None:
    typed(monkeypatch, ["1", "", "one\\", "2", "3"])  # an empty line is not an action; a backslash continues one
    output = stdout_of(main(["env", "play", "guess", "--seed", "1", "--arg", "high=3", "--arg", "tries=3"]))
    assert "Guess a number from 1 to 3" in output and "return: 1 of 1" in output and "episode 2" in output


def test_play_stepwise_on_a_local_file_with_its_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout_of: Callable[..., str]
) -> None:
    row = {"question": "Half of 48, plus 48?", "answer": "72 in all\n#### 72"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 2)
    task = ["--task", "gsm8k", "--path", str(tmp_path), "--task-arg", "val_size=1", "--arg", "calculator=true"]
    typed(monkeypatch, ["Half is <<48/2=", "24 clips, and 24 + 48 = 72 in all", "\\boxed{72}"])
    lines = stdout_of(main(["env", "play", "stepwise", *task, "--arg", "line_reward=0.5"])).splitlines()
    assert "[user] Half of 48, plus 48?" in lines and "[tool] 24>>" in lines
    # the two turns that end at "=" have no reward; the line with the correct equation and the answer have one
    rewards = [line.partition(",")[0].strip("[]") for line in lines if line.startswith("[reward")]
    assert rewards == ["reward 0", "reward 0", "reward 0.5", "reward 1"]


@pytest.mark.slow
def test_the_example_environment_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = ["--train.steps", "2", "--eval.final_examples", "8", "--eval.examples", "4"]
    assert main(["train", "examples/my_env.toml", "--runs_dir", str(tmp_path), *short]) == 0
    lines = (tmp_path / "my_env" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    result = [json.loads(line) for line in lines]
    assert len(result) == 16 * 8 and {len(line["turns"]) for line in result} <= {3, 4}
    assert len({turn["reward"] for line in result for turn in line["turns"]}) == 2  # a third of a point, or nothing
