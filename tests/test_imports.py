"""Who may know whom: the one-way flow of the house, read from the imports themselves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "assay"

# Package or top-level module -> those of ours that it may import. Inside a package everything may import everything.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "terminal": set(),
    "config": {"types"},
    "process": {"types"},
    "mesh": {"types"},
    "text": {"types", "config", "process"},
    "rewards": {"types", "config", "process"},
    "tasks": {"types", "config", "rewards"},
    "envs": {"types", "config", "process", "text", "rewards", "tasks"},
    "models": {"types", "config", "mesh"},
    "algos": {"types", "config", "mesh"},
    "engine": {"types", "config", "process", "mesh", "models"},
    "rollout": {"types", "config", "process", "mesh", "text", "rewards", "tasks", "envs", "engine"},
    "evals": {"types", "config", "rollout", "engine"},
    "runs": {"types", "terminal", "config"},
    "train": {
        *("types", "config", "process", "mesh", "text", "rewards", "tasks", "envs", "models", "algos", "engine"),
        *("rollout", "evals", "runs"),
    },
}
ALLOWED["api"] = ALLOWED["bench"] = ALLOWED["train"] | {"train"}
NO_TORCH = ("types", "terminal", "config", "process", "rewards", "tasks", "envs", "text", "runs")


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(file.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: use absolute imports"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_rooms_import_only_what_they_may(file: Path) -> None:
    room = room_of(file)
    if room in ("cli", "__init__", "__main__"):  # the front door may open every room
        return
    assert room in ALLOWED, f"{file}: add the room '{room}' to the plan"
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "assay" and len(parts) > 1:
            other = parts[1]
            assert other in (room, "__version__") or other in ALLOWED[room], f"{file.name} of {room} imports {name}"


def test_nothing_but_the_command_line_imports_the_loop_or_the_command_line() -> None:
    for file in FILES:
        if room_of(file) in ("cli", "__main__"):
            continue
        for name in imports(file):
            assert not name.startswith("assay.cli"), file
            assert not name.startswith("assay.train.loop"), file


@pytest.mark.parametrize("file", [f for f in FILES if room_of(f) in NO_TORCH], ids=lambda f: str(f.relative_to(SOURCE)))
def test_rooms_without_tensors_do_not_load_torch(file: Path) -> None:
    assert not {n for n in imports(file, top_level_only=True) if n.split(".")[0] == "torch"}


def test_the_loop_fits_on_one_screen() -> None:
    tree = ast.parse((SOURCE / "train" / "loop.py").read_text())
    (train,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert train.end_lineno is not None and train.end_lineno - train.lineno < 50


def test_no_two_classes_have_the_same_name() -> None:
    modules: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(str(file.relative_to(SOURCE)))
    assert not {name: found for name, found in modules.items() if len(found) > 1}


def test_contributing_lists_the_import_rules() -> None:
    page = (SOURCE.parent.parent / "CONTRIBUTING.md").read_text().partition("may import |")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    stated = {name.strip("`"): set(re.findall(r"`(\w+)`", allowed)) for name, _, allowed in rows}
    for name in ("api", "bench"):
        stated[name] |= stated["train"]  # "as `train`, and `train`"
    assert stated.pop("cli") == set() and stated == ALLOWED
