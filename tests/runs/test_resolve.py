from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from assay.runs import Run, checkpoints
from assay.runs.resolve import load_resolved, resolve_model
from assay.types import UserError


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    runs = tmp_path / "runs"
    run = Run.create(runs, "demo", "")
    for step in (10, 20, 30):
        with checkpoints.saving(run.path, step) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_text("{}")
    checkpoints.set_best(run.path, 20, 0.7)
    Run.create(runs, "young", "")
    return runs


@pytest.mark.parametrize(
    ("source", "step"),
    [("run:demo", 30), ("run:demo@last", 30), ("run:demo@best", 20), ("run:demo@10", 10), ("run:demo@000010", 10)],
)
def test_run_tags_resolve_to_checkpoints(runs_dir: Path, source: str, step: int) -> None:
    wanted = runs_dir / "demo" / "checkpoints" / f"step-0000{step}" / "model"
    assert Path(resolve_model(source, runs_dir)) == wanted
    by_path = source.replace("demo", str(runs_dir / "demo"))
    assert Path(resolve_model(by_path, Path("elsewhere"))) == wanted


@pytest.mark.parametrize("source", ["Qwen/Qwen2.5-0.5B", "./folder", "model.gguf", "preset:tiny", "demo@best", ""])
def test_other_model_sources_are_returned_unchanged(runs_dir: Path, source: str) -> None:
    assert resolve_model(source, runs_dir) == source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("run:dmeo", "unknown run 'dmeo' in .*did you mean 'demo'"),
        ("run:", "unknown run ''"),
        ("run:@last", "unknown run ''"),
        ("run:demo@15", "no checkpoint of step 15; available steps: 10, 20, 30"),
        ("run:demo@newest", "a step, last or best, not 'newest'"),
        ("run:young", "no checkpoint yet"),
        ("run:demo@best", "no best checkpoint is recorded"),
    ],
)
def test_errors_list_available_runs_and_steps(runs_dir: Path, source: str, message: str) -> None:
    (runs_dir / "demo" / "checkpoints" / "best.json").unlink()
    with pytest.raises(UserError, match=message):
        resolve_model(source, runs_dir)
    with pytest.raises(UserError, match="assay train"):
        resolve_model(source, runs_dir / "nothing")


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_refused_and_an_intact_one_named(runs_dir: Path) -> None:
    run = runs_dir / "demo"
    flip_bit(checkpoints.folder(run, 30) / "model" / "config.json")
    with pytest.raises(UserError, match=r"run:demo@last: .*step-000030/model/config.json is damaged; use run:demo@20"):
        resolve_model("run:demo@last", runs_dir)
    (checkpoints.folder(run, 30) / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"step-000030/model/config.json is missing; use run:demo@20"):
        resolve_model("run:demo", runs_dir)
    flip_bit(checkpoints.folder(run, 20) / "model" / "config.json")
    with pytest.raises(UserError, match=r"step-000020.* is damaged; use run:demo@10, which is intact"):
        resolve_model("run:demo@best", runs_dir)
    flip_bit(checkpoints.folder(run, 10) / "model" / "config.json")
    with pytest.raises(UserError, match="restore it from a backup"):
        resolve_model("run:demo@10", runs_dir)


def test_symbolic_links_and_relative_paths_to_a_checkpoint_are_verified(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoints.folder(runs_dir / "demo", 30) / "model"
    (tmp_path / "newest").symlink_to(model)
    assert resolve_model(str(model), runs_dir) == str(model)
    flip_bit(model / "config.json")
    monkeypatch.chdir(model)
    for path in (str(model), str(tmp_path / "newest"), "."):
        with pytest.raises(UserError, match=r"config\.json is damaged"):
            resolve_model(path, runs_dir)


def save_and_prune(run: Path, step: int) -> None:
    with checkpoints.saving(run, step) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(f'{{"step": {step}}}')
    checkpoints.prune(run, 1)


@pytest.mark.parametrize("when", ["before reading", "after reading", "not at all"])
def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_replaced_by_the_newer_one(
    runs_dir: Path, when: str
) -> None:
    run, loaded = runs_dir / "demo", []

    def load(path: str) -> str:
        loaded.append(Path(path).parent.name)
        if when == "before reading" and len(loaded) == 1:
            save_and_prune(run, 40)
        text = (Path(path) / "config.json").read_text()
        if when == "after reading" and len(loaded) == 1:
            save_and_prune(run, 40)  # other files may have been missing without an error
        return text

    text = load_resolved("run:demo@last", runs_dir, load)
    newer = when != "not at all"
    assert text == ('{"step": 40}' if newer else "{}")
    assert loaded == ["step-000030"] + ["step-000040"] * newer


@pytest.mark.parametrize("source", ["run:demo@last", "nobody/no-such-model"])
def test_errors_of_loading_what_was_not_deleted_are_raised(runs_dir: Path, source: str) -> None:
    asked = []

    def load(path: str) -> None:
        asked.append(path)
        raise UserError(f"{path} is unsuitable")

    with pytest.raises(UserError, match=r"(step-000030/model|nobody/no-such-model) is unsuitable"):
        load_resolved(source, runs_dir, load)
    assert len(asked) == 1


def test_a_step_that_is_deleted_while_it_is_loaded_is_named_with_those_left(runs_dir: Path) -> None:
    def load(path: str) -> None:
        save_and_prune(runs_dir / "demo", 40)

    with pytest.raises(UserError, match="there is no checkpoint of step 30; available steps: 20, 40"):
        load_resolved("run:demo@30", runs_dir, load)


_BUSY_RUN = """
import sys
from pathlib import Path
from assay.runs import checkpoints
run = Path(sys.argv[1])
for step in range(31, 100_000):
    with checkpoints.saving(run, step) as folder:
        (folder / "model").mkdir()
        for name in "abcdef":
            (folder / "model" / name).write_text(str(step))
    checkpoints.prune(run, 1)
"""


def test_readers_of_a_run_in_progress_always_get_one_whole_checkpoint(runs_dir: Path) -> None:
    def load(path: str) -> set[str]:
        files = list(Path(path).iterdir())
        return {str(len(files)), *(file.read_text() for file in files)}

    run = runs_dir / "demo"
    checkpoints.set_best(run, 10, 0.7)
    writer = subprocess.Popen([sys.executable, "-c", _BUSY_RUN, str(run)])
    try:
        while checkpoints.last(run) == 30:
            assert writer.poll() is None
        found: list[set[str]] = []
        while len(found) < 100 or len(set(map(frozenset, found))) < 4:  # until several were saved meanwhile
            assert writer.poll() is None
            found.append(load_resolved("run:demo@last", runs_dir, load))
    finally:
        writer.kill()
        writer.wait()
    assert all(len(texts) == 2 and "6" in texts for texts in found)


def test_a_checkpoint_without_model(runs_dir: Path) -> None:
    with checkpoints.saving(runs_dir / "demo", 40) as folder:
        (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match="has no model folder"):
        resolve_model("run:demo@40", runs_dir)


def test_only_what_is_loaded_is_verified(runs_dir: Path) -> None:
    run = runs_dir / "demo"
    with checkpoints.saving(run, 40) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "optimizer.safetensors").write_text("moments")
    flip_bit(checkpoints.folder(run, 40) / "optimizer.safetensors")
    assert resolve_model("run:demo@40", runs_dir).endswith("step-000040/model")
