"""Structure of the source: import rules, no import cycles, unique class names, modules that tests name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "assay"

# Package or top-level module -> those of ours that it may import. Inside a package everything may import everything.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "config": {"types"},
    "mesh": {"types"},
    "system": {"types", "config"},
    "text": {"types", "config", "system"},
    "rewards": {"types", "config", "system"},
    "tasks": {"types", "config", "system", "rewards"},
    "envs": {"types", "config", "system", "text", "rewards", "tasks"},
    "models": {"types", "config", "mesh", "system"},
    "algos": {"types", "config", "mesh"},
    "engine": {"types", "config", "mesh", "system", "models"},
    "rollout": {"types", "config", "mesh", "system", "text", "rewards", "tasks", "envs", "engine"},
    "evals": {"types", "config", "engine", "rollout"},
    "runs": {"types", "config"},
    "checks": {"types", "config", "runs", "rewards", "tasks", "envs", "algos"},
    "training": {
        *("types", "config", "mesh", "system", "text", "tasks", "models"),
        *("algos", "engine", "rollout", "evals", "runs", "checks"),
    },
    "build": {
        *("types", "config", "mesh", "system", "text", "rewards", "tasks", "envs"),
        *("models", "algos", "engine", "rollout", "evals", "runs", "checks", "training", "integrations"),
    },
    "integrations": {"types", "config", "system", "rewards", "tasks", "envs", "models", "engine", "runs"},
    "server": {"types", "config", "system", "text", "rewards", "engine", "runs"},
    "web": {"types", "system", "text", "evals", "runs", "checks"},
    "testing": {"types", "system", "tasks", "envs", "models", "engine"},
}
ALLOWED["bench"] = ALLOWED["build"] - {"integrations"} | {"build"}
ALLOWED["api"] = ALLOWED["bench"] | {"web"}
NO_TORCH = {"types", "config", "system", "rewards", "tasks", "envs", "text", "evals", "runs", "checks", "web"}


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


class Statements(NamedTuple):
    """Statements of a module: imports at the top level, in functions, and under TYPE_CHECKING; classes."""

    top: list[ast.stmt]
    inner: list[ast.stmt]
    typing: list[ast.stmt]
    classes: list[str]


@cache
def statements(file: Path) -> Statements:
    """Without the syntax tree itself, which would take memory and time of the tests that follow."""
    found = Statements([], [], [], [])

    def visit(nodes: Iterable[ast.AST], kind: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                kind.append(node)
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
                if isinstance(node, ast.ClassDef):
                    found.classes.append(node.name)
                guard = kind is found.top and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
                visit(ast.iter_child_nodes(node), found.typing if guard or kind is found.typing else found.inner)

    visit(ast.parse(file.read_text()).body, found.top)
    return found


@cache
def imports(file: Path, *, top_level_only: bool = False, with_typing: bool = False) -> set[str]:
    """Names of imported modules, and of imported objects with their module in front."""
    found, names = statements(file), set[str]()
    for node in (*found.top, *([] if top_level_only else found.inner), *(found.typing if with_typing else [])):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: use absolute imports"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(SOURCE.rglob("*.py"))


def test_packages_import_only_what_the_rules_allow() -> None:
    packages = {file: package_of(file) for file in FILES}
    ruled = {file: name for file, name in packages.items() if name not in ("cli", "__init__", "__main__")}
    assert set(ruled.values()) == set(ALLOWED)
    forbidden = [
        f"{file} imports {name}"
        for file, package in ruled.items()
        for name in imports(file)
        if name.startswith("assay.") and name.split(".")[1] not in ALLOWED[package] | {package, "__version__"}
    ]
    assert not forbidden, "\n".join(forbidden)


def test_there_are_no_import_cycles() -> None:
    """Counting late imports and those under TYPE_CHECKING, but not imports of a package's own __init__."""
    modules = {".".join(file.relative_to(SOURCE.parent).with_suffix("").parts): file for file in FILES}
    graph = {
        name: {other for other in imports(file, with_typing=True) if other in modules} for name, file in modules.items()
    }
    while graph:  # remove modules that are imported by none of the others, or import none of them
        imported = set().union(*graph.values())
        removable = {name for name, targets in graph.items() if name not in imported or not targets}
        if not removable:
            break
        graph = {name: targets - removable for name, targets in graph.items() if name not in removable}
    assert not graph, f"import cycles among {sorted(graph)}"


def test_every_module_is_named_in_a_test_of_its_package() -> None:
    unnamed, texts = [], {}
    for file in FILES:
        *folders, name = file.relative_to(SOURCE).with_suffix("").parts
        package = folders[0] if folders else ""
        if package not in texts:
            tests = (TESTS / package).rglob("*.py") if package else TESTS.glob("test_*.py")
            texts[package] = "".join(f"{test.stem} {test.read_text()}" for test in tests)
        if not name.startswith("__") and not re.search(rf"(\b|_){name}\b", texts[package]):
            unnamed.append("/".join((*folders, name)))
    assert not unnamed


def test_only_the_command_line_and_the_python_api_import_the_training_loop() -> None:
    for file in FILES:
        if package_of(file) in ("cli", "__main__"):
            continue
        for name in imports(file):
            assert not name.startswith("assay.cli"), file
            assert package_of(file) == "api" or not name.startswith("assay.training.loop"), file


def test_the_core_does_not_import_integrations() -> None:
    """It loads them by name, so that their packages are optional; the OpenAI endpoint needs no other package."""
    users = ("integrations", "cli")
    others = {file: imports(file) for file in FILES if package_of(file) not in users}
    found = {name for names in others.values() for name in names if name.startswith("assay.integrations.")}
    assert {name for name in found if not name.startswith("assay.integrations.openai")} == set()


def test_packages_without_tensors_do_not_load_torch() -> None:
    files = [file for file in FILES if package_of(file) in NO_TORCH]
    names = {file: {name.split(".")[0] for name in imports(file, top_level_only=True)} for file in files}
    assert not [file for file in files if "torch" in names[file]]


def test_the_loop_fits_on_one_screen() -> None:
    tree = ast.parse((SOURCE / "training" / "loop.py").read_text())
    (train,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert train.end_lineno is not None and train.end_lineno - train.lineno < 50


def test_no_two_classes_have_the_same_name() -> None:
    modules: dict[str, list[str]] = {}
    for file in FILES:
        for name in statements(file).classes:
            modules.setdefault(name, []).append(str(file.relative_to(SOURCE)))
    assert not {name: found for name, found in modules.items() if len(found) > 1}


def test_contributing_lists_the_import_rules() -> None:
    page = (SOURCE.parent.parent / "CONTRIBUTING.md").read_text().partition("may import |")[2]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    stated = {name.strip("`"): set(re.findall(r"`(\w+)`", allowed)) for name, _, allowed in rows}
    for name in ("api", "bench"):  # "as `build`, and `build`"
        stated[name] |= stated["build"] - {"integrations"}
    assert stated.pop("cli") == set() and stated == ALLOWED
