"""`assay completion`, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from assay.algos.recipes import RECIPES
from assay.cli.main import COMMANDS, main
from assay.config import TrainConfig
from assay.config.settings import keys

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
