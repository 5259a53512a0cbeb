"""What a run directory names outside of itself is used only with consent, which is stored outside of it as well."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from small_run import SmallRuns
from stub_endpoint import stub_endpoint

from assay import Trainer
from assay.build import trust
from assay.build.measure import ScoreConfig
from assay.cli.chat import ChatConfig
from assay.cli.main import main
from assay.config import ServeConfig, TrainConfig
from assay.config.settings import Resource, keys, load_settings, resource_of, to_toml
from assay.rewards.functions import _function
from assay.tasks import make_task
from assay.types import UserError

EVIL = """
from pathlib import Path
Path(__file__).with_suffix(".ran").touch()
def Task():
    return {split: [{"question": "1+1?", "answer": "2"}] for split in ("train", "validation", "test")}
def reward(completion, answer):
    return 1.0
def system(command=None):
    return Task()
"""
SETTINGS = {
    "task": 'task = "{file}:Task"',
    "task module": 'task = "{module}:Task"',
    "rows of a task": 'task = {{name = "jsonl", path = "{data}", args = {{map = "{file}:reward"}}}}',
    "judge of a task": 'task = {{name = "jsonl", path = "{data}", args = {{judge = "{file}:reward"}}}}',
    "environment": 'env = "{file}:Task"',
    "rows, by a path like a built-in task's": (
        'task = {{name = "jsonl", path = "{data}", args = {{map = "reasoning_gym:/{up}{file}:reward"}}}}'
    ),
    "reward function": (
        'task = {{name = "abacus", args = {{train_size = 9, eval_size = 9}}}}\nreward = {{function = "{file}:reward"}}'
    ),
}


@pytest.fixture(autouse=True)
def fresh_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    trust._unconfirmed.clear()


class Gift:
    """A run directory from another user."""

    def __init__(self, folder: Path, settings: str) -> None:
        self.folder = folder / "gift"
        self.folder.mkdir()
        self.file = self.folder / "evil_code.py"
        self.file.write_text(EVIL)
        (self.folder / "data.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 9)
        names = {"file": self.file, "module": "evil_code", "data": self.folder / "data.jsonl"}
        names["up"] = ".." + "/.." * 20
        (self.folder / "config.toml").write_text(settings.format(**names) + '\nmodel = "preset:nano"\n')

    def __call__(self, command: str, *words: str) -> int:
        models = ["--resume", str(self.folder)] if command == "train" else [f"run:{self.folder}@last"]
        return main([command, *models, *words])

    @property
    def ran(self) -> bool:
        return self.file.with_suffix(".ran").exists()


@pytest.fixture
def make_gift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.syspath_prepend(str(tmp_path / "gift"))
    yield lambda settings: Gift(tmp_path, settings)
    sys.modules.pop("evil_code", None)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("command", ["eval", "train"])
def test_a_foreign_run_imports_nothing_without_consent(command: str, settings: str, make_gift, capsys) -> None:
    gift = make_gift(SETTINGS[settings])
    assert gift(command) == 2
    error = capsys.readouterr().err
    if not (command == "eval" and settings == "reward function"):  # there the missing checkpoint is found first
        assert str(gift.file) in error and "--trust" in error
    assert len(error.splitlines()) == 1 and not gift.ran


@pytest.mark.parametrize("key", ["algo.advantage", "algo.terms", "engine.name"])
def test_losses_and_engines_of_a_foreign_run_are_not_imported(key: str, make_gift, capsys) -> None:
    task = 'task = {{name = "abacus", args = {{train_size = 9, eval_size = 9}}}}'
    gift = make_gift(f'{task}\n{key} = "{{file}}:reward"')
    assert gift("train") == 2
    error = capsys.readouterr().err
    assert str(gift.file) in error and "--trust" in error and not gift.ran


def test_remote_code_of_a_foreign_runs_model_needs_consent(tmp_path: Path, capsys) -> None:
    gift = Gift(tmp_path, 'task = "abacus"')
    (gift.folder / "config.toml").write_text('task = "abacus"\n[model]\nsource = "x/y"\ntrust_remote_code = true\n')
    assert gift("train") == 2
    assert "trust_remote_code" in (error := capsys.readouterr().err) and "--trust" in error


def test_chat_imports_a_foreign_runs_task_only_when_asked_for_it(make_gift) -> None:
    gift = make_gift(SETTINGS["task"])
    assert gift("chat", "--prompt", "/task") == 2
    assert not gift.ran


def test_trust_is_remembered_until_the_code_or_its_arguments_change(make_gift, capsys) -> None:
    gift = make_gift(SETTINGS["task"])
    assert gift("eval", "--trust") == 2 and gift.ran  # it has no checkpoint
    assert "no checkpoint" in capsys.readouterr().err
    assert gift("eval") == 2
    assert "no checkpoint" in capsys.readouterr().err
    for change in ("code", "arguments", "another object of the same file"):
        gift.file.with_suffix(".ran").unlink(missing_ok=True)
        config = gift.folder / "config.toml"
        before = config.read_text()
        if change == "code":
            gift.file.write_text(EVIL + "# changed")
        elif change == "arguments":
            config.write_text(f'task = {{name = "{gift.file}:Task", args = {{x = 1}}}}\n')
        else:
            config.write_text(before.replace(":Task", ":system"))
        assert gift("eval") == 2
        assert "--trust" in capsys.readouterr().err and not gift.ran
        config.write_text(before)
        gift.file.write_text(EVIL)


def test_only_code_named_in_the_command_is_consent_to_it(make_gift, capsys) -> None:
    gift = make_gift(SETTINGS["task"])
    assert gift("eval", "--seed", "3", "--eval.samples", "2") == 2 and not gift.ran
    assert gift("eval", "--task", f"{gift.file}:Task") == 2 and gift.ran
    assert "no checkpoint" in capsys.readouterr().err


def test_a_copy_of_trusted_code_in_another_folder_is_not_trusted(
    make_gift, tmp_path: Path, monkeypatch, capsys
) -> None:
    """It would import other modules of that folder."""
    gift = make_gift('task = "evil_code.py:Task"')
    monkeypatch.chdir(gift.folder)
    assert main(["eval", "run:.@last", "--trust"]) == 2 and gift.ran
    gift.file.with_suffix(".ran").unlink()
    copy = shutil.copytree(gift.folder, tmp_path / "copy")
    monkeypatch.chdir(copy)
    assert main(["eval", "run:.@last"]) == 2
    assert "--trust" in capsys.readouterr().err and not (copy / "evil_code.ran").exists()


@pytest.mark.slow
def test_runs_started_by_the_user_need_no_consent(small: SmallRuns, tmp_path: Path, capsys) -> None:
    assert small.train("--train.steps", 1) == 0
    assert small("eval", "run:small@last", "--eval.final_examples", 2) == 0
    assert small("train", "--resume", "small", "--train.steps", 2) == 0
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "\n# changed")
    _function.cache_clear()  # as in a new process
    assert small("train", "--resume", "small", "--train.steps", 3) == 0  # users edit their own files
    config = small.runs / "small" / "config.toml"
    config.write_text(config.read_text().replace("reward.py", "other.py"))
    shutil.copy(tmp_path / "reward.py", tmp_path / "other.py")
    capsys.readouterr()
    assert small("eval", "run:small@last", "--eval.final_examples", 2) == 2
    assert "other.py" in capsys.readouterr().err


def test_settings_that_were_written_to_a_file_have_the_same_digest(tmp_path: Path) -> None:
    args = {"x": 1, "y": 0.5, "z": [1, "a.py:b"], "deep": {"k": "v"}, "safe": False}
    cfg = TrainConfig.model_validate({"task": {"name": "a.py:b", "args": args}, "algo": {"advantage": "m:f"}})
    (tmp_path / "config.toml").write_text(to_toml(cfg))
    read = load_settings(TrainConfig, tmp_path / "config.toml", {})
    assert all(trust.digest(read, contents) == trust.digest(cfg, contents) for contents in (True, False))
    del read.task.args["safe"]
    assert all(trust.digest(read, contents) != trust.digest(cfg, contents) for contents in (True, False))


def test_modules_are_located_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "evil_package"
    package.mkdir()
    for name in ("__init__", "inner"):
        (package / f"{name}.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert trust.code_file("evil_package.inner:Task") == package / "inner.py"
    assert trust.code_file("evil_package:Task") == package / "__init__.py"
    assert trust.code_file("evil_package.none:Task") is None
    assert trust.code_file("..:x") is None and trust.code_file("a\0b.py:x") is None


def test_the_python_api_requires_trust(make_gift) -> None:
    gift = make_gift(SETTINGS["task"])

    class Own(Trainer):
        def train(self) -> None: ...

    with pytest.raises(UserError, match="trust=True"):
        Own(resume=gift.folder, quiet=True)
    assert not gift.ran


def test_a_prepared_data_folder_cannot_name_code(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "manifest.json").write_text(
        f'{{"judge": "{tmp_path}/evil.py:reward", "files": {{"train.jsonl": {{}}}}}}'
    )
    with pytest.raises(UserError, match=r"manifest.*task\.args\.judge"):
        make_task("jsonl", str(tmp_path))
    assert not (tmp_path / "evil.ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "trusted"), [("y", True), ("", False)])
def test_the_user_is_asked_at_a_terminal(answer: str, trusted: bool, make_gift) -> None:
    gift = make_gift(SETTINGS["task"])
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "assay", "eval", f"run:{gift.folder}@last"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, close_fds=True)
    os.close(child)
    os.write(parent, f"{answer}\n".encode())
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    assert process.wait() == 2 and gift.ran is trusted
    assert str(gift.file).encode() in shown and b"[y/N]" in shown


NAMES_NOTHING = {  # settings with a text that is only a text, or a name in the run itself
    *("name", "runs_dir", "device", "lora.targets", "prompt.template", "prompt.system", "reward.format_pattern"),
    *("judge.extra", "judge.rubric", "judge.questions", "judge.device", "openai.extra", "reference.extra"),
    *("sampling.stop", "eval.stop"),
    *("algo.recipe", "algo.aggregate", "vllm.devices", "vllm.model", "sglang.devices", "server.devices", "http.name"),
    "log.trackio",
}


def holds_text(kind: Any) -> bool:
    if get_origin(kind) is not None and get_origin(kind) not in (list, dict, tuple) and str in get_args(kind):
        return True  # a union
    return kind in (str, Any) or (get_origin(kind) in (list, dict, tuple) and any(map(holds_text, get_args(kind))))


def test_every_setting_with_a_text_declares_what_it_names() -> None:
    """If this fails for a new setting: declare its `Resource`, or add it to the texts that name nothing."""
    words = ("url", "file", "env", "host", "path", "python", "folder", "program", "command", "code")
    suspicious = {*words, *(f"{word}s" for word in words)}
    for key, field in (entry for kind in (TrainConfig, ChatConfig, ServeConfig, ScoreConfig) for entry in keys(kind)):
        declared = resource_of(field) is not None
        if holds_text(field.annotation):
            assert declared is (key not in NAMES_NOTHING), key
        assert declared or not suspicious & set(key.rpartition(".")[2].split("_")), key


def test_what_any_setting_names_is_used_only_with_consent(tmp_path: Path) -> None:
    values = {"model.trust_remote_code": True, "algo.term_args": {"Term": {"x": "m:f"}}}
    for key, field in keys(TrainConfig):
        if (resource := resource_of(field)) is None:
            continue
        value = values.get(key, {"x": "m:f"} if get_origin(field.annotation) is dict else "m:f")
        cfg = load_settings(TrainConfig, None, {key: value})
        if resource is Resource.DATA:  # alone they cannot leave this machine
            trust.guard_run(cfg, tmp_path)
            continue
        trust.guard_run(cfg, tmp_path, used=["other.key", f"{key}_2"])
        with pytest.raises(UserError, match=rf"{key}.* = (m:f|True)"):
            trust.guard_run(cfg, tmp_path)
            trust.check_import("m:f")
        assert all(trust.digest(TrainConfig(), contents) != trust.digest(cfg, contents) for contents in (True, False))
        trust.remember_trust(cfg, started=True)
        trust.guard_run(cfg, tmp_path)
        trust.check_import("m:f")


@pytest.mark.parametrize("value", [True, 1, "yes"])
def test_programs_without_confinement_need_consent(value: object, tmp_path: Path) -> None:
    part = {"name": "code", "args": {"allow_unconfined": value}}
    with pytest.raises(UserError, match="runs programs"):
        trust.guard_run(load_settings(TrainConfig, None, {"task.args": {"tasks": [part]}}), tmp_path)


def test_plain_runs_of_other_people_need_no_consent(tmp_path: Path) -> None:
    own = tmp_path / "gift" / "notes.txt"
    own.parent.mkdir()
    own.write_text("text")
    for settings in ({}, {"engine": "vllm"}, {"prompt.system_file": str(own), "task.path": str(tmp_path)}):
        trust.guard_run(load_settings(TrainConfig, None, settings), own.parent)


def test_all_spellings_of_a_path_out_of_the_run_folder_need_consent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, secret = tmp_path / "gift", tmp_path / "secret.txt"
    (folder / "inner" / "deep").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "link.txt").symlink_to(secret)
    (folder / "up").symlink_to("..")
    (folder / "inner" / "deep" / "link.txt").symlink_to("../../../secret.txt")
    (folder / "loop").symlink_to("loop")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    paths = [str(secret), "../secret.txt", f"{folder}/../secret.txt", "~/secret.txt", "link.txt", "up/secret.txt"]
    for path in [*paths, "inner", f"{folder}/link.txt", "up/gift/link.txt"]:
        with pytest.raises(UserError, match="system_file"):
            trust.guard_run(load_settings(TrainConfig, None, {"prompt.system_file": path}), Path("."))
    for path in ("inner/deep/../other.txt", "up/gift/other.txt", "~/gift/other.txt", f"{folder}/other.txt", "loop"):
        trust.guard_run(load_settings(TrainConfig, None, {"prompt.system_file": path}), Path("."))


def test_trust_ends_when_a_link_in_the_run_folder_leads_elsewhere(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Be brief.")
    cfg = load_settings(TrainConfig, None, {"judge.url": "http://127.0.0.1:1", "judge.rubric_file": str(rubric)})
    trust.guard_run(cfg, tmp_path, trust=True)
    trust.guard_run(cfg, tmp_path)
    rubric.unlink()
    rubric.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="rubric_file"):
        trust.guard_run(cfg, tmp_path)


def test_the_question_names_everything_that_consent_covers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also data, which alone need no consent; and a text cannot imitate the question."""
    questions = []
    settings = {"judge.url": "http://x/\nTrust it?", "judge.api_key_env": "KEY", "task.path": "/etc/passwd"}
    cfg = load_settings(TrainConfig, None, settings | {"reward.function": "m:f"})
    monkeypatch.setattr(trust, "asker", lambda: lambda question: bool(questions.append(question)) or True)
    trust.guard_run(cfg, tmp_path, used=())
    assert not questions  # code is asked for when it is imported
    trust.check_import("m:f")
    assert len(questions) == 1 and "\n" not in questions[0]
    assert all(text in questions[0] for text in ("http://x/", "KEY", "/etc/passwd", "m:f"))
    trust.guard_run(cfg, tmp_path)
    assert len(questions) == 1


def test_settings_of_the_command_replace_those_that_need_consent(tmp_path: Path) -> None:
    cfg = load_settings(TrainConfig, None, {"judge.url": "http://evil", "judge.api_key_env": "KEY"})
    for typed, asked in (
        ({"judge.url": "http://own"}, True),
        ({"judge.url": "http://own", "judge.api_key_env": ""}, False),
    ):
        with pytest.raises(UserError, match="KEY") if asked else nullcontext():
            trust.guard_run(cfg, tmp_path, typed=typed)


def test_trust_includes_settings_that_were_changed_by_a_command() -> None:
    before, after, other = (load_settings(TrainConfig, None, {"judge.url": f"http://{name}"}) for name in "abc")
    trust.extend_trust(before, after)  # not trusted
    assert not trust.is_trusted(after)
    trust.remember_trust(before, started=True)
    trust.extend_trust(before, after)
    assert trust.is_trusted(after) and not trust.is_trusted(other)


JUDGED = """
task = {{{{name = "abacus", args = {{{{train_size = 8, eval_size = 4}}}}}}}}
sampling = {{{{max_new_tokens = 4}}}}
train = {{{{steps = 1, prompts = 2, samples = 2}}}}
eval = {{{{final_examples = 2}}}}
reward = {{{{workers = 0, function = "judge"}}}}
prompt = {{{{system_file = "{secret}"}}}}
judge = {{{{url = "{url}", model = "j", api_key_env = "SECRET_KEY", rubric_file = "{secret}", cache = ""}}}}
"""


def test_a_foreign_run_sends_nothing_to_its_judge_without_consent(
    make_gift, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, no_curves: None
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("my secret")
    monkeypatch.setenv("SECRET_KEY", "my key")
    with stub_endpoint(lambda body: str(len(body["messages"][0]["content"]) % 5 + 1), key="my key") as judge:
        gift = make_gift(JUDGED.format(url=judge.url, secret=secret))
        assert gift("train") == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1 and not judge.requests
        assert all(text in error for text in (judge.url, "SECRET_KEY", str(secret), "--trust"))
        assert gift("train", "--trust") == 0
        assert "my secret" in judge.requests[0]["messages"][0]["content"] and not judge.problems


@pytest.mark.parametrize("command", ["eval", "chat", "serve"])
def test_commands_read_no_file_that_the_prompts_of_a_foreign_run_name(
    command: str, make_gift, tmp_path: Path, capsys
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("my secret")
    gift = make_gift(f'task = "abacus"\nprompt = {{{{system_file = "{secret}"}}}}')
    assert gift(command) == 2
    error = capsys.readouterr().err
    assert str(secret) in error and "--trust" in error and len(error.splitlines()) == 1
    for words in (["--prompt.system_file", str(secret)], ["--trust"]):
        assert gift(command, *words) == 2
        assert "no checkpoint" in capsys.readouterr().err
