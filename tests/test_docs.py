"""The documentation is true: its commands parse, its settings exist, its links lead somewhere, its examples run."""

from __future__ import annotations

import importlib
import io
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from docs_parts import BLOCK, ROOT, block, blocks, command_lines
from metric_names import METRICS, meaning

import assay
from assay.algos.recipes import RECIPES
from assay.cli.eval import SETTINGS as MeasureConfig
from assay.cli.main import COMMANDS, main, parse
from assay.cli.serve import SETTINGS as ServeConfig
from assay.config import TrainConfig
from assay.config.settings import keys, load_settings
from assay.types import UserError

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
PAGES = [page for page in PAGES if page.exists()]
SCRIPTS = ("bench/recipes.py", "bench/trl_step.py", "bench/transformers_generate.py")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A path of the repository, as text or code: a known folder, then names. Placeholders in capitals are not paths.
PLACE = re.compile(r"(?<![\w./-])(?:src|tests|configs|examples|docs|bench|dev)/[\w./-]*[\w/]")


def commands(page: Path) -> list[list[str]]:
    """Calls of assay, also those with torchrun."""
    called = (words[words.index("assay") :] for words in command_lines(page) if "assay" in words)
    return [words[1:] for words in called]


def script_commands(page: Path) -> list[list[str]]:
    """Calls of the scripts in bench/ that take the options of a command."""
    return [words[1:] for words in command_lines(page) if words[:1] == ["python"] and words[1] in SCRIPTS]


def check_command(words: list[str]) -> None:
    """As the command line reads it, up to the point where work would begin. Raises UserError on a mistake."""
    name, *rest = words
    if name in SCRIPTS:
        module = importlib.import_module(Path(name).stem)
    elif name in COMMANDS:
        module = importlib.import_module(f"assay.cli.{name}")
    else:
        raise UserError(f"no command {name}")
    args = parse(module, name, rest)
    if hasattr(module, "SETTINGS"):
        config = getattr(args, "config", None)
        file = ROOT / config if config and (ROOT / config).exists() else None
        if module.SETTINGS is not TrainConfig and file is not None:  # only some settings of the file are used
            load_settings(TrainConfig, file, {})
            file = None
        load_settings(module.SETTINGS, file, args.overrides)


def output_after(page: Path, command: str) -> list[str]:
    """Lines of the `text` block that follows a documented command; "..." marks omitted lines and is left out."""
    _, _, rest = page.read_text().partition(f"```bash\n{command}\n```\n\n```text\n")
    lines = rest.partition("```")[0].splitlines()
    assert lines, f"{page.name} has no output for {command}"
    return [line for line in lines if line != "..."]


def without_numbers(line: str) -> str:
    return " ".join(re.sub(r"[+-]?\d[\d.,]*(?:e-?\d+)?", "N", line).split())


Item = tuple[Path, str]  # a page, and a text in it


def every(items: list[Item]) -> Callable[[Callable[[Item], None]], Callable[[], None]]:
    """Turn the check of an item into a test of all items, which reports all failures together."""

    def test_of(check: Callable[[Item], None]) -> Callable[[], None]:
        def test() -> None:
            failures = []
            for item in items:
                try:
                    check(item)
                except Exception as error:
                    failures.append(f"{item[0].name}: {item[1][:80]}: {error}")
            assert items and not failures, "\n".join(failures)

        test.__name__ = check.__name__
        return test

    return test_of


@every([(page, shlex.join(words)) for page in PAGES for words in commands(page) + script_commands(page)])
def test_commands_parse(item: Item) -> None:
    check_command(shlex.split(item[1]))


def test_the_documented_commands_cover_the_command_line() -> None:
    assert {words[0] for page in PAGES for words in commands(page)} >= set(COMMANDS)


@pytest.mark.parametrize("wrong", ["trian x", "train --optim.lrr 3", "score x.jsonl --nope", "data prepare gsm9k"])
def test_a_wrong_command_would_be_noticed(wrong: str) -> None:
    with pytest.raises(UserError):
        check_command(shlex.split(wrong))


@every([(page, code) for page in PAGES for code in blocks(page, "toml")])
def test_settings_exist(item: Item) -> None:
    TrainConfig.model_validate(tomllib.loads(item[1]))


KEYS = {key for kind in (TrainConfig, MeasureConfig, ServeConfig) for key, _ in keys(kind)}
SECTIONS_OF_KEYS = {key.partition(".")[0] for key in KEYS if "." in key}
NOT_SETTINGS = {"engine.info", "model.safetensors", "train.jsonl", "train.parquet"}
KINDS_OF_METRICS = {name.partition("/")[0] for name in METRICS}


def inline(pattern: str) -> list[Item]:
    """What is written as code in the text of a page."""
    found = ((page, re.findall(f"`({pattern})(?: = [^`]*)?`", BLOCK.sub("", page.read_text()))) for page in PAGES)
    return [(page, name) for page, names in found for name in sorted(set(names))]


@every([item for item in inline(r"[a-z]+\.[a-z_]+") if item[1].partition(".")[0] in SECTIONS_OF_KEYS])
def test_settings_in_the_text_exist(item: Item) -> None:
    assert item[1] in KEYS | NOT_SETTINGS, "no such setting"


@every([item for item in inline(r"[a-z]+/[a-z_]+") if item[1].partition("/")[0] in KINDS_OF_METRICS])
def test_metrics_in_the_text_exist(item: Item) -> None:
    assert meaning(item[1]), "no such metric"


@every([(page, code) for page in PAGES for code in blocks(page, "python")])
def test_python_compiles(item: Item) -> None:
    compile(item[1], item[0].name, "exec")


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub generates them, and explicit anchors."""
    text = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    generated = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return generated | set(re.findall(r'<a id="([^"]+)">', text))


@every([(page, link) for page in PAGES for link in LINK.findall(page.read_text())])
def test_links_lead_somewhere(item: Item) -> None:
    page, link = item
    if "://" in link:
        return
    file, _, anchor = link.partition("#")
    target = page.parent / file if file else page
    assert target.exists(), "no such file"
    assert not anchor or anchor in anchors(target), "no such heading"


@every([(page, place) for page in PAGES for place in sorted(set(PLACE.findall(page.read_text())))])
def test_paths_exist(item: Item) -> None:
    assert (ROOT / item[1]).exists(), "no such path"


@every(
    [
        (page, name)
        for page in PAGES
        if page.parent != ROOT
        for name in sorted(set(re.findall(r"`(test_\w+)`", page.read_text())))
    ]
)
def test_named_tests_exist(item: Item) -> None:
    assert any(f"def {item[1]}(" in file.read_text() for file in (ROOT / "tests").rglob("test_*.py")), "no such test"


PYTEST = re.compile(r"(?:^|`)(?:\.venv/bin/)?pytest (tests/[^`\n]*)", re.MULTILINE)


@every([(page, command) for page in PAGES for command in PYTEST.findall(page.read_text())])
def test_pytest_commands_select_tests(item: Item) -> None:
    """The tests and the words of `-k` that a command names occur in its files."""
    path, *options = shlex.split(item[1])
    path, _, test = path.partition("::")
    words = set(re.findall(r"\w+", dict(pairwise(options)).get("-k", ""))) - {"not", "and", "or"}
    files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("test_*.py"))
    text = "".join(f"{file.name} {file.read_text()}" for file in files)
    assert f"def {test}" in text and all(word in text for word in words), "selects nothing"


SECTIONS = {"dr_grpo": "Dr. GRPO", "ppo": "A critic (PPO)", "reinforce_pp": "REINFORCE++", "remax": "ReMax"}


@every([(ROOT / "docs" / "reference" / "algorithms.md", recipe) for recipe in RECIPES])
def test_each_recipe_has_a_section(item: Item) -> None:
    """What it starts from and where that comes from, when to use it, and which metrics to watch."""
    parts = re.split(r"^##+ ", item[0].read_text(), flags=re.MULTILINE)
    heading = SECTIONS.get(item[1], item[1])
    (section,) = [part for part in parts if part.splitlines()[0].lower() == heading.lower()]
    assert all(f"**{word}**" in section for word in ("Defaults", "When", "Watch"))


ERRORS = [
    error
    for page in ("guides/configuration.md", "start/coming-from.md")
    for error in re.findall(r"^\$ assay (.*)\n(.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
]


@pytest.mark.parametrize(("command", "message"), ERRORS, ids=[command for command, _ in ERRORS])
def test_documented_error_messages_match_the_program(
    command: str, message: str, stderr_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert stderr_of(main(shlex.split(command))).strip() == message


def write_coming_from_example(folder: Path) -> None:
    """The files of coming-from.md, and a few problems in the columns that it names."""
    page = ROOT / "docs" / "start" / "coming-from.md"
    for code in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            (folder / named[1]).write_text(code)
    (folder / "grpo.toml").write_text(next(code for code in blocks(page, "toml") if "grpo" in code))
    rows = [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


SMALL = ["--model", "preset:nano", "--model.tokenizer", "characters", "--sampling.max_new_tokens", "8"]


@pytest.mark.parametrize("function", ["my_reward.py:reward", "trl_rewards.py:correct", "verl_rewards.py:compute_score"])
def test_rewards_of_coming_from_judge_answers(
    function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_coming_from_example(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.jsonl").write_text(
        "".join(json.dumps({"completion": text, "answer": "12"}) + "\n" for text in ("It is 12", "It is 13"))
    )
    code = main(["score", "answers.jsonl", "--reward", function, "--out", "judged.jsonl", "--workers", "0"])
    assert code == 0, capsys.readouterr().err
    judged = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert [row["verdict"]["reward"] for row in judged] == [1.0, 0.0]


def test_the_rewards_of_rewards_md_are_those_of_the_example() -> None:
    assert block("guides/rewards.md", "python", "def shorter") in (ROOT / "examples" / "rewards.py").read_text()


def test_documented_problem_matches_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    command = "assay data show abacus -n 1 --arg style=plain --arg distractors=1"
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.splitlines() == output_after(ROOT / "docs" / "guides" / "data.md", command)


def test_documented_dry_run_matches_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line, except for numbers; predicted times are written differently on slow and fast machines."""
    monkeypatch.chdir(ROOT)
    assert main(["train", "examples/my_task.toml", "--dry-run", "--threads", "1"]) == 0
    captured = capsys.readouterr()
    page = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    _, _, rest = page.partition("other programs used as well:\n\n```text\n")
    documented = {without_numbers(line) for line in rest.partition("```")[0].splitlines()}
    printed = [line for line in (captured.out + captured.err).splitlines() if "eta" not in line]
    (total,) = [line for line in documented if ": about " in line]
    assert documented - {total} == {without_numbers(line) for line in printed if ": about " not in line}
    expected = "40 steps of examples/my_task.py:SortLetters on this CPU: about "
    assert sum(line.startswith(expected) for line in printed) == 1


def table_rows(page: str, start: str) -> list[dict[str, str]]:
    """Rows of the table whose first line starts with `start`, by column."""
    _, _, rest = (ROOT / "docs" / page).read_text().partition(f"\n{start}")
    header, _, *rows = [line.strip("| ").split(" | ") for line in (start + rest).split("\n\n")[0].splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def measured(row: dict[str, str]) -> dict:
    """The file of raw numbers that a row of a table links to."""
    return json.loads((ROOT / "docs" / "evidence" / LINK.findall(row["raw numbers"])[0]).read_text())


RUNS = table_rows("evidence/benchmarks.md", "| model | weights |")
BENCHMARKS = table_rows("evidence/benchmarks.md", "| model | workload |")


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row["`assay train`"].strip("`"))
def test_documented_time_of_a_run_is_the_measured_time(row: dict[str, str]) -> None:
    found = measured(row)
    config = load_settings(TrainConfig, ROOT / row["`assay train`"].strip("`"), {})
    if "rows" in found:  # the demo
        found = {**found["rows"][0], "steps": config.train.steps}
    if "train_s" not in found:  # several seeds
        found = found["runs"][-1]
    step_s = found.get("step_s") or found["train_s"] / found["steps"]
    shown = row["seconds per step"]
    assert shown == f"{step_s:.{len(shown.partition('.')[2])}f}"
    assert row["total, s"] == f"{found['wall_s']:.0f}"
    assert row["steps"] == str(found["steps"]) == str(config.train.steps)
    assert row["answers per step"] == f"{config.train.prompts} x {config.train.samples}"


@pytest.mark.parametrize("row", BENCHMARKS, ids=lambda row: row["command"].strip("`"))
def test_documented_peak_memory_is_the_measured_memory(row: dict[str, str]) -> None:
    check_command(shlex.split(row["command"].strip("`"))[1:])
    shape = row["model"].split()[0].lower()
    part = {"GRPO step": "step", "update only": "train", "generation only": "gen"}[row["workload"].partition(",")[0]]
    size = {"train": "16x1024"}.get(part, "16x64x256")
    found = next(r for r in measured(row)["rows"] if r["id"] == f"{part}-{shape}-{size}" and r["system"] == "assay")
    assert row["peak memory, GiB"] == f"{found.get('peak_gib') or found['peak_memory_gib']:.1f}"
    speed = found.get("tokens_per_s")
    assert row["measured speed"] == (f"{speed:,.0f} tokens/s" if speed else f"{found['step_s']:.2f} s per step")


def test_the_async_environment_of_environments_md_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout_of: Callable[..., str]
) -> None:
    (tmp_path / "tool.py").write_text(block("guides/environments.md", "python", "async def step"))
    monkeypatch.chdir(tmp_path)
    assert main(["env", "check", "tool.py:Asking", "--task", "abacus", "-n", "3"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("<ask>why?</ask>\n"))
    assert "[tool] <answer>15</answer>" in stdout_of(main(["env", "play", "tool.py:Asking", "--task", "abacus"]))


BASE = 'model = "preset:nano"\ntask = "task.py:SortLetters"\nsampling.max_new_tokens = 8\n'


def test_the_task_of_data_md_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(block("guides/data.md", "python", "class SortLetters(Task)"))
    monkeypatch.chdir(tmp_path)
    assert main(["data", "check", "task.py:SortLetters"]) == 0
    (tmp_path / "run.toml").write_text(BASE + "sft.steps = 1\n")
    assert main(["train", "run.toml", "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("reference/algorithms.md", 'recipe = "ppo"'),
        ("guides/own-algorithm.md", "mine.py:half_norm"),
        ("guides/rewards.md", "my_reward.py:reward"),
        ("guides/rewards.md", "examples/rewards.py:shorter"),
        ("guides/environments.md", "tries = 4"),
        pytest.param("guides/data.md", "reasoning_gym:chain_sum", marks=pytest.mark.slow),
    ],
)
def test_settings_of_a_page_pass_the_dry_run(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the Python files that the page shows beside them, and the task of data.md, unless they name a model."""
    if "reasoning_gym" in text:
        pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    (tmp_path / "task.py").write_text(block("guides/data.md", "python", "class SortLetters(Task)"))
    (tmp_path / "mine.py").write_text(block("guides/own-algorithm.md", "python", "def half_norm"))
    (tmp_path / "my_reward.py").write_text(block("guides/rewards.md", "python", "async def reward"))
    settings = block(page, "toml", text)
    (tmp_path / "run.toml").write_text(settings if "model" in tomllib.loads(settings) else BASE + settings)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    # Judging in this process: worker processes take longer to start than all the rest.
    assert main(["train", "run.toml", "--dry-run", "--reward.workers", "0"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_and_the_mix_of_data_md_work_on_a_small_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "guides" / "data.md"
    raw = tmp_path / "path" / "to" / "gsm8k"
    raw.mkdir(parents=True)
    for split, start in (("train", 0), ("test", 1000)):
        sums = [(f"What is {a} + 7?", f"{a} + 7 = {a + 7}\n#### {a + 7}") for a in range(start, start + 600)]
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in sums]
        (raw / f"{split}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    documented = [words for words in commands(page) if words[0] == "data" and words[2] == "gsm8k"]
    assert [words[1] for words in documented] == ["prepare", "check"]
    for words in documented:
        assert main(words) == 0, capsys.readouterr().err
    settings = block("guides/data.md", "toml", 'name = "mix"')
    (tmp_path / "run.toml").write_text(settings)
    short = ["--train.steps", "1", "--eval.final_examples", "20", "--eval.examples", "10"]
    assert main(["train", "run.toml", *SMALL, *short, "--dry-run"]) == 0, capsys.readouterr().err


def test_the_row_mapping_of_data_md_is_the_example() -> None:
    assert block("guides/data.md", "python", "def to_problem") in (ROOT / "examples" / "rows.py").read_text()


def test_the_verdicts_of_rewards_md_are_those_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = next(code for code in blocks(ROOT / "docs" / "guides" / "rewards.md", "text") if '"verdict"' in code)
    shown = [json.loads(line) for line in text.splitlines()]
    rows = [{key: value for key, value in row.items() if key != "verdict"} for row in shown]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    assert main(["score", "answers.jsonl", "--task", "gsm8k", "--out", "judged.jsonl", "--workers", "0"]) == 0
    assert [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()] == shown


FEW = '"train.steps": 2, "eval.final_examples": 10, "eval.examples": 5'


@pytest.mark.slow
def test_the_loop_with_replay_of_own_loop_md_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("guides/own-loop.md", "python", "class Replayed(Trainer)")
    assert code.count('"optim.lr": 1e-4') == 1
    (tmp_path / "replayed.py").write_text(code.replace('"optim.lr": 1e-4', f'"optim.lr": 1e-4, "sft.steps": 2, {FEW}'))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path("replayed.py")["summary"]["steps"] == 2


@pytest.mark.slow
def test_the_session_of_own_loop_md_is_the_run_of_assay_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = block("guides/own-loop.md", "python", "with assay.session(")
    for text in ('"steps": 40', '"steps": 50', "run.step % 10"):
        assert code.count(text) == 1
    code = (
        code.replace('"steps": 40', FEW).replace('"steps": 50', '"steps": 2').replace("run.step % 10", "run.step % 1")
    )
    (tmp_path / "loop.py").write_text(code)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("loop.py")
    whole = assay.train(**names["settings"], lr=5e-4, max_new_tokens=8, sft={"steps": 2, "lr": 3e-3}, name="whole")
    weights = "checkpoints/step-000002/model/model.safetensors"
    assert (names["run"].path / weights).read_bytes() == (whole.path / weights).read_bytes()
    assert names["run"].summary["after"] == whole.summary["after"]


def test_the_classic_loop_of_own_loop_md_is_the_example() -> None:
    code = block("guides/own-loop.md", "python", "class Classic(Trainer)")
    assert code == (ROOT / "examples" / "classic_loop.py").read_text()


@pytest.mark.slow
def test_the_own_task_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    short = ["--train.steps", "12", "--eval.examples", "10", "--threads", "1"]  # enough for a gain, as on the page
    runs = tmp_path / "runs"
    assert main(["train", "examples/my_task.toml", "--runs_dir", str(runs), *short]) == 0
    captured = capsys.readouterr()
    output = re.sub(rf"(run:|assay runs ){runs}/", r"\1", captured.out + captured.err)
    output = output.replace(str(runs), "runs")
    printed = {without_numbers(line) for line in output.splitlines()}
    documented = output_after(ROOT / "docs" / "start" / "quickstart.md", "assay train examples/my_task.toml")
    (demo,) = [code for code in blocks(ROOT / "README.md", "") if code.startswith("abacus, test split")]
    documented += demo.replace("demo", "my_task").splitlines()[1:]  # the first line names the task of the demo
    assert not {without_numbers(line) for line in documented if "eta" not in line} - printed
    summary = json.loads((runs / "my_task" / "summary.json").read_text())
    assert summary["steps"] == 12 and summary["before"]["n"] == summary["after"]["n"] == 60
    assert summary["after"]["format"] == 1.0 and set(summary["after"]["statuses"]) <= {"ok", "wrong"}
    lines = (runs / "my_task" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    rewards = {json.loads(line)["reward"] for line in lines}
    assert len(lines) == 16 * 8 and rewards <= {0.0, 0.25, 0.5, 0.75, 1.0} and len(rewards) > 1
    monkeypatch.chdir(tmp_path)  # the blocks of the pages that use this run
    exec(block("reference/run-folder.md", "python", "read_rollouts"), {})
    assert main(["export", "run:my_task@last", "exported"]) == 0
    capsys.readouterr()
    exec(block("start/quickstart.md", "python", "AutoModelForCausalLM"), {})
    assert "<user> sort f a d b <assistant>" in capsys.readouterr().out


def test_the_table_of_extras_is_complete() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = table_rows("start/quickstart.md", "| extra | purpose |")
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row["extra"])} == set(extras)


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_the_readme_and_the_start_page_link_every_page(start: str) -> None:
    page = ROOT / start
    linked = {(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(page.read_text())}
    missing = {path for path in (ROOT / "docs").rglob("*.md") if path != page} - linked
    assert not missing
