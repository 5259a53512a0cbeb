"""Single-bit damage in the files of a run: every command that loads from the run refuses it or is unaffected."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.runs.resolve import resolve_model
from assay.types import UserError

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
WORDS = ("--save.every", 1, "--save.keep", 9, "--eval.every", 1, "--algo.kl_coef", 0.1)
LOADERS: dict[str, tuple[object, ...]] = {
    "export": ("export", "run:flipped@last", "exported"),
    "eval": ("eval", "run:flipped@last", "--eval.final_examples", 2),
    "chat": ("chat", "run:flipped", "--prompt", "hello"),
    "train": ("train", "small.toml", "--model", "run:flipped@2", "--name", "next"),
    "sft": ("sft", "small.toml", "--model", "run:flipped@last", "--sft.steps", 1, "--name", "next"),
    "reference": ("train", "small.toml", "--algo.kl_coef", 0.1, "--algo.reference", "run:flipped@2", "--name", "next"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    small = SmallRuns(tmp_path_factory.mktemp("flips"))
    assert small.train(*WORDS) == 0
    shutil.copytree(small.runs / "small", small.runs / "flipped")
    return small


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file; called again, it restores the file."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def flips(run: Path, count: int) -> Iterator[tuple[Path, int]]:
    """`count` random bits of every file, or all bits if there are fewer."""
    chance = random.Random(0)
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        bits = 8 * file.stat().st_size
        for bit in chance.sample(range(bits), min(count, bits)):
            yield file, bit


@pytest.mark.parametrize(
    ("name", "file"),
    [*((name, "model.safetensors") for name in LOADERS), ("export", "config.json"), ("export", "tokenizer.json")],
)
def test_loading_a_checkpoint_with_a_flipped_bit_is_refused(
    finished: SmallRuns,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    file: str,
) -> None:
    monkeypatch.chdir(finished.folder)
    damaged = finished.checkpoint(2, "flipped") / "model" / file
    bit = 8 * damaged.stat().st_size - 100
    flip(damaged, bit)
    try:
        assert finished(*LOADERS[name]) == 2
    finally:
        flip(damaged, bit)
    said = capsys.readouterr().err
    assert f"{damaged} is damaged; use run:flipped@1, which is intact" in said and said.count("assay: ") == 1
    assert not (finished.folder / "exported").exists() and not (finished.runs / "next").exists()


def folder_of(path: str) -> tuple[str, dict[str, bytes]]:
    return Path(path).parent.name, {file.name: file.read_bytes() for file in Path(path).iterdir()}


@pytest.mark.slow
def test_no_bit_flip_changes_which_model_is_loaded(finished: SmallRuns) -> None:
    """4 bits of each file, or all of them."""
    runs = finished.runs
    tags = ("@0", "@1", "@2", "@last", "@best", "")
    intact = {tag: folder_of(resolve_model(f"run:small{tag}", runs)) for tag in tags}
    for file, bit in flips(runs / "flipped", 4):
        flip(file, bit)
        refused = 0
        for tag in tags:
            try:
                model = resolve_model(f"run:flipped{tag}", runs)
            except UserError:
                refused += 1
            else:
                assert folder_of(model) == intact[tag], (file, bit)
        flip(file, bit)
        assert refused or not file.match("checkpoints/*/model/*"), (file, bit)
