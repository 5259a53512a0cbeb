"""Help, unknown commands, one line for every mistake, `python -m assay`, output in distributed runs, and completion."""

from __future__ import annotations

import errno
import os
import pty
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from waiting import until

from assay import __version__
from assay.algos.recipes import RECIPES
from assay.cli.main import COMMANDS, Parser, main, run, should_report, split_words
from assay.config import TrainConfig
from assay.config.sections import BUILT_IN_ENGINES as ENGINES
from assay.config.settings import keys, parse_overrides
from assay.envs.builtin import ENVS
from assay.runs.console import is_main, make_console
from assay.tasks.registry import TASKS
from assay.types import UserError

SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_without_arguments_all_commands_are_listed(stdout_of: Callable[..., str]) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        output = stdout_of(main(words))
        assert all(f"\n  {name} " in output for name in COMMANDS) and "--debug" in output
    assert stdout_of(main(["--version"])) == f"assay {__version__}\n"


TORCH_STANDIN = """
import os
os.write(2, b"torch is imported\\n")
os._exit(3)
"""


@pytest.mark.parametrize(
    ("terminal", "words"),
    [
        (False, ("train", "configs/demo.toml", "--model", "MODEL", "--runs_dir", "FOLDER/runs")),
        (True, ("chat", "MODEL")),
    ],
)
def test_loading_is_shown_before_torch_is_imported(terminal: bool, words: tuple[str, ...], tmp_path: Path) -> None:
    """The import takes seconds. A package that ends the process stands in for torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH_STANDIN)
    words = tuple(word.replace("FOLDER", str(tmp_path)) for word in words)
    own, theirs = pty.openpty() if terminal else os.pipe()
    done = subprocess.run(
        [sys.executable, "-m", "assay", *words],
        cwd=SOURCE.parent,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}", "TERM": "xterm", "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = os.read(own, 65536).decode()
    os.close(own)
    assert done.returncode == 3 and "loading MODEL" in shown.partition("torch is imported")[0]


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (["trian"], "did you mean 'train'"), (["zzz"], "known: train")
    arguments = [(words, "--help") for words in (["eval"], ["train", "a.toml", "b.toml"], ["train", "--resume"])]
    arguments.append((["train"], "give a TOML file"))
    for words, hint in (*commands, *arguments):
        assert main(words) == 2
        result = capsys.readouterr()
        assert hint in result.err and result.err.startswith("assay: ") and result.err.count("\n") == 1
        assert not result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as leaving:  # argparse's own way, for commands without settings
        assert leaving.code == 0
    assert f"usage: assay {command}" in capsys.readouterr().out


def test_debug_shows_the_traceback(stderr_of: Callable[..., str]) -> None:
    assert "Traceback" not in stderr_of(main(["train", "nowhere.toml"]))
    for words in (["--debug", "train", "nowhere.toml"], ["train", "nowhere.toml", "--debug"]):
        output = stderr_of(main(words))
        assert "Traceback" in output and "UserError" in output
        assert output.splitlines()[-1].startswith("assay: no config file at nowhere.toml")


def test_a_warning_is_one_line_without_source_location(capsys: pytest.CaptureFixture[str]) -> None:
    def warning(words: list[str]) -> int:
        warnings.warn("two\nlines", stacklevel=1)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(warning, [], debug=False, own_process=True) == 0
    assert capsys.readouterr().err == "warning: two lines\n"


def test_an_interrupt_prints_no_traceback(stderr_of: Callable[..., str]) -> None:
    def stopped(words: list[str]) -> int:
        raise KeyboardInterrupt

    assert "Traceback" not in stderr_of(main(["x"], stopped), 130)


@pytest.mark.parametrize(
    ("error", "output"),
    [
        (OSError(errno.EIO, "Input/output error", "runs/a/config.toml"), "input/output error) (runs/a/config.toml)"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "cannot read or write x: Permission denied"),
        (RuntimeError("Error while serializing: I/O error: Input/output error (os error 5)"), "input/output error"),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (MemoryError(), "main memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 24.00 MiB."), "out of GPU memory"),
        (UserError("one\n  two\r\nthree"), "assay: one two three\n"),
    ],
)
def test_errors_of_users_and_of_the_operating_system_are_one_line(
    error: Exception, output: str, stderr_of: Callable[..., str]
) -> None:
    def fails(words: list[str]) -> int:
        raise error

    shown = stderr_of(main(["x"], fails))
    assert output in shown and shown.startswith("assay: ") and shown.count("\n") == 1
    if not isinstance(error, UserError):
        with pytest.raises(type(error)):
            main(["x", "--debug"], fails)


def words_of(text: str) -> tuple[list[str], dict[str, object]]:
    parser = Parser(prog="assay")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--split")
    parser.add_argument("--fast", action="store_true")
    own, overrides = split_words(text.split(), parser, TrainConfig)
    return own, parse_overrides(overrides)


@pytest.mark.parametrize(
    ("text", "own", "overrides"),
    [
        ("--optim.lr 1e-4 m n", "m n", {"optim.lr": 1e-4}),
        ("--task abacus m --split test", "m --split test", {"task": "abacus"}),
        ("--log.tensorboard m", "m", {"log.tensorboard": True}),  # a switch does not take the model as its value
        ("--log.tensorboard false m", "m", {"log.tensorboard": False}),
        ("--reward.wrong -1 m", "m", {"reward.wrong": -1}),
        ("m --reward.strict --seed 3", "m", {"reward.strict": True, "seed": 3}),
        ("m --train.token-budget 7", "m", {"train.token_budget": 7}),
        ("--split=test m", "--split=test m", {}),
    ],
)
def test_settings_before_or_after_arguments(text: str, own: str, overrides: dict[str, object]) -> None:
    assert words_of(text) == (own.split(), overrides)


def test_exit_codes_are_those_that_the_help_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    (tmp_path / "all.jsonl").write_text('{"question": "1 + 1?", "answer": "2", "solution": "3"}\n')
    wrong = ["data", "check", "jsonl", "--path", str(tmp_path / "all.jsonl"), "--arg", "extract=boxed"]
    codes = {
        main(["info"]): "0 done",
        main(wrong): "1 problems were found",
        main(["data", "check", "no"]): "2 an error",
    }
    codes[main([], interrupted) - signal.SIGINT] = "128 + N stopped by signal N"
    assert [*codes] == [0, 1, 2, 128]
    capsys.readouterr()
    shown = " ".join(stdout_of(main(["--help"])).split()).partition("exit codes: ")[2]
    assert [part.split()[0] for part in shown.split("; ")] == ["0", "1", "2", "128"]
    assert all(text in shown for text in codes.values())


def test_python_m_assay() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    module = subprocess.run([sys.executable, "-m", "assay", "trian"], capture_output=True, text=True, env=environment)
    assert module.returncode == 2 and module.stderr.startswith("assay: unknown command 'trian': did you mean 'train'?")
    script = f"{sys.executable} -m assay --help | head -1; exit ${{PIPESTATUS[0]}}"  # which closes the pipe
    piped = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert piped.returncode in (0, 141) and "assay: teach" in piped.stdout and "Traceback" not in piped.stderr


def as_rank(monkeypatch: pytest.MonkeyPatch, world: int, rank: int, local: int) -> None:
    for name, value in (("WORLD_SIZE", world), ("RANK", rank), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, str(value))


def test_only_one_process_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("assay.cli.main.stopped_within", lambda _: True)  # as if the first process had ended
    result = []
    for world, rank, local in ((1, 0, 0), (4, 0, 0), (4, 1, 1), (4, 2, 0), (1, 3, 3)):  # the last: an unrelated RANK
        as_rank(monkeypatch, world, rank, local)
        make_console().note(f"rank {rank} of {world}")
        assert main(["train", "nowhere.toml"]) == 2
        output = capsys.readouterr()
        assert output.out == (f"rank {rank} of {world}\n" if is_main() else "")
        assert output.err.count("nowhere.toml") == should_report()
        result.append((is_main(), should_report()))
    assert [prints for prints, _ in result] == [True, True, False, False, True]
    assert [reports for _, reports in result] == [True, True, False, True, True]  # one per node


def test_an_error_of_one_process_alone_is_printed_by_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(monkeypatch, world=4, rank=1, local=1)
    monkeypatch.setattr("assay.cli.main.FIRST_PROCESS_S", 0.1)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["train", "nowhere.toml"]) == 2
    assert "nowhere.toml" in capsys.readouterr().err and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads which signals a process catches")
def test_the_first_process_of_a_node_has_time_to_print_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, world=4, rank=1, local=1)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-m", "assay", "train", "nowhere.toml"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:

        def catches_sigterm() -> bool:
            status = Path(f"/proc/{process.pid}/status").read_text().split("SigCgt:")[1].split()[0]
            return bool(int(status, 16) >> (signal.SIGTERM - 1) & 1)

        until(catches_sigterm)
        process.send_signal(signal.SIGTERM)  # as the launcher does when the first process has ended
        assert process.communicate()[1] == "" and process.returncode == 2


# Help of settings


def test_help_lists_every_setting_in_its_group(stdout_of: Callable[..., str]) -> None:
    output = stdout_of(main(["train", "--help"]))
    lines = output.splitlines()
    assert "general:" in lines
    for key, field in keys(TrainConfig):
        (line,) = [number for number, text in enumerate(lines) if text.startswith(f"  --{key} ")]
        assert (field.description or "").split()[0] in lines[line]
        section = key.rpartition(".")[0]
        heading = next(text for text in reversed(lines[:line]) if text and not text.startswith(" "))
        assert heading.startswith(f"{section}: " if section else "general:")
    assert max(map(len, lines)) <= 120
    assert "[300.0]" in output  # defaults are shown


@pytest.mark.parametrize(
    ("words", "belongs"),
    [
        (["train", "--help", "optim"], lambda key: key.startswith("optim.")),
        (["train", "--help", "--optim"], lambda key: key.startswith("optim.")),
        (["train", "configs/demo.toml", "-h", "seed"], lambda key: key == "seed"),
        (["eval", "--help", "general"], lambda key: key in ("runs_dir", "seed", "threads", "device")),
    ],
)
def test_help_of_a_section_of_a_key_and_of_general_settings(
    words: list[str], belongs: Callable[[str], bool], stdout_of: Callable[..., str]
) -> None:
    lines = stdout_of(main(words)).splitlines()
    shown = {line.split()[0] for line in lines if line.startswith("  --")}
    assert shown == {f"--{key}" for key, _ in keys(TrainConfig) if belongs(key)}
    assert not any(line.startswith("usage") for line in lines)
    assert any("one of constant, linear, cosine" in line for line in lines) == ("--optim.lr" in shown)


def test_help_lists_the_names_of_registries(stdout_of: Callable[..., str]) -> None:
    for key, names in (("algo.recipe", RECIPES), ("task.name", TASKS), ("env.name", ENVS), ("engine.name", ENGINES)):
        assert f"built in: {', '.join(names)}" in " ".join(stdout_of(main(["train", "--help", key])).split())


def test_help_of_an_unknown_section_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command, word, hint in (("train", "optm", "'optim'"), ("eval", "optim", "known: general")):
        assert main([command, "--help", word]) == 2
        result = capsys.readouterr()
        assert hint in result.err and result.err.count("\n") == 1 and not result.out


# `assay completion`, in the shells themselves


BASH = """
source {script}
COMP_WORDS=({words} "{last}"); COMP_CWORD={index}
_assay
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
compdef() {{ }}
_files() {{ }}
compadd() {{ shift; for word in "$@"; do [[ $word == {last}* ]] && print -r -- $word; done }}
source {script}
words=({words} "{last}"); CURRENT={index}+1
_assay
"""
FISH = "source {script}; complete -C '{words} {last}' | string replace -r '\\t.*' ''"
PROGRAMS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@pytest.fixture(scope="module", params=PROGRAMS)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    script = tmp_path_factory.mktemp("completion") / "script"
    with script.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        assert main(["completion", request.param]) == 0
    return request.param, script


def completed(shell: tuple[str, Path], text: str) -> set[str]:
    name, script = shell
    *words, last = text.split(" ")
    program = PROGRAMS[name].format(script=script, words=" ".join(words), last=last, index=len(words))
    done = subprocess.run([name, "-c", program], capture_output=True, text=True, cwd=script.parent)
    assert not done.stderr
    return set(done.stdout.split())


def test_commands_options_settings_and_values_complete(shell: tuple[str, Path]) -> None:
    settings = {f"--{key}" for key, _ in keys(TrainConfig)}
    assert completed(shell, "assay ") >= set(COMMANDS)
    assert completed(shell, "assay ex") == {"export"}
    assert completed(shell, "assay train --train.st") == {key for key in settings if key.startswith("--train.st")}
    assert completed(shell, "assay train --") >= {"--resume", *settings}
    assert completed(shell, "assay train c.toml --optim.l") == {key for key in settings if key.startswith("--optim.l")}
    assert completed(shell, "assay train --algo.recipe dr") == {name for name in RECIPES if name.startswith("dr")}
    assert completed(shell, "assay export a b --gguf q") == {"q8_0"}
    assert completed(shell, "assay bench ep") == {"episodes"}
    assert "--train.steps" not in completed(shell, "assay export --")
