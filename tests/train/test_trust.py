"""Code that a run directory names is imported only with consent, which is stored outside of the run directory."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.api import Trainer
from assay.cli.main import main
from assay.config import TrainConfig
from assay.config.settings import load_settings, to_toml
from assay.rewards.functions import _function
from assay.tasks import make_task
from assay.train import trust
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


@pytest.mark.parametrize("path", ["advantage", "policy_loss", "terms"])
def test_losses_of_a_foreign_run_are_not_imported(path: str, make_gift, capsys) -> None:
    gift = make_gift(f'task = "abacus"\nalgo = {{{{{path} = "{{file}}:reward"}}}}')
    assert gift("train") == 2
    assert "--trust" in capsys.readouterr().err and not gift.ran


def test_the_engine_of_a_foreign_run_is_not_imported_without_consent(make_gift, capsys) -> None:
    gift = make_gift(
        'task = {{name = "abacus", args = {{train_size = 9, eval_size = 9}}}}\nengine = {{name = "{file}:reward"}}'
    )
    assert gift("train") == 2
    error = capsys.readouterr().err
    assert str(gift.file) in error and "--trust" in error and not gift.ran
    assert gift("train", "--trust") == 2 and gift.ran


def test_trust_in_runs_with_built_in_engines_does_not_depend_on_the_engine(tmp_path: Path) -> None:
    """Consent stored by versions without custom engines stays valid."""
    names = ("auto", "native", "m:make")
    cfgs = [TrainConfig.model_validate({"task": {"name": "a.py:b"}, "engine": {"name": name}}) for name in names]
    auto, native, own = (trust.digest(cfg, contents=False) for cfg in cfgs)
    assert auto == native != own and "engine" not in trust.code_settings(cfgs[0])


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


def test_code_named_in_the_command_is_consent_to_it(make_gift, capsys) -> None:
    gift = make_gift(SETTINGS["task"])
    assert gift("eval", "--task", f"{gift.file}:Task") == 2 and gift.ran
    assert "no checkpoint" in capsys.readouterr().err


def test_other_settings_in_the_command_are_not_consent(make_gift) -> None:
    gift = make_gift(SETTINGS["task"])
    assert gift("eval", "--seed", "3", "--eval.samples", "2") == 2
    assert not gift.ran


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
def test_runs_started_by_the_user_need_no_consent(tmp_path: Path, capsys) -> None:
    small = SmallRuns(tmp_path)
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
    args = {"x": 1, "y": 0.5, "z": [1, "a.py:b"], "deep": {"k": "v"}}
    cfg = TrainConfig.model_validate({"task": {"name": "a.py:b", "args": args}, "algo": {"advantage": "m:f"}})
    (tmp_path / "config.toml").write_text(to_toml(cfg))
    read = load_settings(TrainConfig, tmp_path / "config.toml", {})
    assert all(trust.digest(read, contents) == trust.digest(cfg, contents) for contents in (True, False))


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
@pytest.mark.parametrize(("answer", "trusted"), [("y", True), ("", False), ("n", False)])
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


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_programs_and_servers_of_a_foreign_run_need_consent(tmp_path: Path, engine: str) -> None:
    plain = TrainConfig()
    cfg = TrainConfig.model_validate({"engine": engine, engine: {"python": "/evil/python"}})
    for one, asked in ((plain, False), (cfg, True)):
        run = trust.guard_run(one, tmp_path)
        assert run is not None
        if asked:
            with pytest.raises(UserError, match=r"starts programs, or sends its weights to servers"):
                run.check_remote_code()
        else:
            run.check_remote_code()
    trust.remember_trust(cfg, started=True)  # a run of the user
    assert trust.guard_run(cfg, tmp_path) is None
    for changes in ({"python": "/other/python"}, {"args": ["--x"]}, {"urls": ["http://evil"]}, {"folder": "/x"}):
        changed = cfg.model_copy(update={engine: getattr(cfg, engine).model_copy(update=changes)})
        assert trust.guard_run(changed, tmp_path) is not None
