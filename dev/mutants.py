"""Do the tests notice defects? Runs small defects (mutants) of the source against the tests of their package.

The mutants are drawn with a fixed seed, from each file in proportion to its code lines. A mutant is killed if a test
fails, or if the tests exceed the time limit. Two folders of tests are compared on the same mutants:

python dev/mutants.py --tests old/tests --out before.json
python dev/mutants.py --tests tests --out after.json
python dev/mutants.py --table before.json after.json

With --coverage DATA..., only tests that execute the changed line are run (for definitions of a module: tests that
execute any function of it). DATA are files written by `coverage run --branch`, with the setting
`dynamic_context = test_function`. Results are written after each mutant; the same command continues an interrupted
run. Code that tests execute in other processes only is covered by the tests of the module of the same name.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from count_lines import code_lines

SOURCE = Path(__file__).resolve().parent.parent / "src"
AREAS = {  # files of the source, and their tests
    "algos": ("assay/algos", ["algos"]),
    "learner": ("assay/training/learner", ["training/learner"]),
    "scheduler": (
        "assay/engine/native/scheduler.py",
        ["engine/native/test_scheduler.py"] + [f"engine/test_{name}.py" for name in ("continuations", "in_process")],
    ),
    "rewards": ("assay/rewards", ["rewards"]),
}
MARKERS = "not slow and not gpu and not peer and not slurm and not ray and not vllm and not sglang"
PRELOADED = ("torch", "pydantic", "httpx", "hypothesis.strategies", "pytest", "sympy", "math_verify")
PRELOADED += tuple(f"transformers.models.{name}" for name in ("gpt2.modeling_gpt2", "qwen2.modeling_qwen2", "auto"))
PRELOADED += ("assay.config", "assay.system", "assay.models", "assay.text")  # which import none of the areas
COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
ARITHMETIC |= {ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list"}
# What changes, the lines that execute it, and the function that changes it.
Change = tuple[str, set[int], Callable[[], None]]


def changes(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[Change]:
    """All defects that this script can put into a syntax tree, in a fixed order."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    statement = node if isinstance(node, ast.stmt) else statement
    if statement is not None and isinstance(node, ast.stmt | ast.expr):
        lines = {statement.lineno, *range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        for what, field, value in alternatives(node):
            yield f"line {node.lineno}: {what}", lines, lambda f=field, v=value: setattr(node, f, v)
    for field, value in ast.iter_fields(node):
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if field in SKIPPED_FIELDS or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.stmt) and removable(child):
                remove = lambda body=value, at=place: body.__setitem__(at, ast.Pass())  # noqa: E731
                lines = {*range(child.lineno, (child.end_lineno or child.lineno) + 1)}
                yield f"line {child.lineno}: {type(child).__name__} removed", lines, remove
            yield from changes(child, statement)


def alternatives(node: ast.stmt | ast.expr) -> Iterator[tuple[str, str, Any]]:
    """What changes, the field of the node, and its new value."""
    match node:
        case ast.Compare(ops=[op]):
            new = COMPARISONS[type(op)]
            yield f"{type(op).__name__} becomes {new.__name__}", "ops", [new()]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            new = ARITHMETIC[type(op)]
            yield f"{type(op).__name__} becomes {new.__name__}", "op", new()
        case ast.BoolOp(op=op):
            yield "and/or exchanged", "op", ast.And() if isinstance(op, ast.Or) else ast.Or()
        case ast.Constant(value=bool(value)):
            yield f"{value} becomes {not value}", "value", not value
        case ast.Constant(value=int(value) | float(value)):
            new_value = value + (1 if node.lineno % 2 else -1)
            yield f"{value} becomes {new_value}", "value", new_value
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", "value", ast.Constant(None)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", "operand", ast.UnaryOp(ast.Not(), operand)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.UnaryOp):
            yield "condition negated", "test", ast.UnaryOp(ast.Not(), test)


def removable(node: ast.stmt) -> bool:
    """Whether the rest of the function is still complete without this statement."""
    match node:
        case ast.Expr(value=value):
            return not isinstance(value, ast.Constant)
        case ast.Assign(targets=[target]):
            return not isinstance(target, ast.Name | ast.Tuple)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    """The mutants: a number of each file that is proportional to its code lines."""
    files = [
        (area, file)
        for area, (place, _) in AREAS.items()
        for file in (sorted((SOURCE / place).glob("[!_]*.py")) if (SOURCE / place).is_dir() else [SOURCE / place])
    ]
    sizes = [code_lines(file.read_text()) for _, file in files]
    exact = [count * size / sum(sizes) for size in sizes]
    by_rest = sorted(range(len(files)), key=lambda i: int(exact[i]) - exact[i])
    extra = set(by_rest[: count - sum(map(int, exact))])
    rng = random.Random(seed)
    drawn = []
    for i, (area, file) in enumerate(files):
        found = [(what, sorted(lines)) for what, lines, _ in changes(ast.parse(file.read_text()))]
        for number in sorted(rng.sample(range(len(found)), min(len(found), int(exact[i]) + (i in extra)))):
            name = str(file.relative_to(SOURCE))
            what, lines = found[number]
            drawn.append({"area": area, "file": name, "number": number, "what": what, "lines": lines})
    return drawn


def select(mutant: dict[str, Any], tests: Path, executed: dict[str, dict[int, list[str]]] | None) -> list[str]:
    """The tests to run, those in the module of the same name first."""
    places = [tests / place for place in AREAS[mutant["area"]][1]]
    modules = [file for place in places for file in (sorted(place.rglob("test_*.py")) if place.is_dir() else [place])]
    modules.sort(key=lambda file: file.stem != f"test_{Path(mutant['file']).stem}")
    if executed is None:
        return [str(module) for module in modules]
    by_line = executed.get(mutant["file"], {})
    names = {name for line in mutant["lines"] for name in by_line.get(line, [])} - {""}
    names = names or {name for line in by_line.values() for name in line} - {""}
    drawn = any(name.startswith("hypothesis.") for name in names)  # hypothesis hides which test it calls
    return [
        f"{module}::{node.name}"
        for module in modules
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if f"tests.{'.'.join(module.relative_to(tests).with_suffix('').parts)}.{node.name}" in names
        or (drawn and any("given" in ast.dump(decorator) for decorator in node.decorator_list))
    ] or [str(module) for module in modules[:1]]


def run(selected: list[str], limit: int) -> str:
    """`survived`, `killed` or `timeout`: the tests in a forked process, which has imported torch already."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = run_tests(selected, limit)
        finally:
            os._exit(code)
    end, status = time.monotonic() + 5 * limit, None
    while status is None and time.monotonic() < end:
        time.sleep(0.1)
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with the processes that tests have started
    if status is None:
        os.waitpid(child, 0)
    if status is None or os.WIFSIGNALED(status):
        return "timeout"
    return "survived" if os.WEXITSTATUS(status) in (0, 5) else "killed"  # 5: no test was selected


def run_tests(selected: list[str], limit: int) -> int:
    import hypothesis
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.chdir(selected[0].split("/tests/")[0])
    hypothesis.settings.register_profile(  # as in conftest.py, but failing examples are not made smaller
        "mutants", deadline=None, derandomize=True, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
    )
    options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants", "-m", MARKERS]
    return int(pytest.main([*options, *selected]))


def read_coverage(files: list[str]) -> dict[str, dict[int, list[str]]]:
    """Of each file of the source, the tests that execute each line."""
    coverage = importlib.import_module("coverage")
    executed: dict[str, dict[int, list[str]]] = {}
    for file in files:
        data = coverage.CoverageData(file)
        data.read()
        for measured in data.measured_files():
            lines = executed.setdefault(measured[measured.rindex("assay/") :], {})
            for line, names in data.contexts_by_lineno(measured).items():
                lines[line] = lines.get(line, []) + names
    return executed


def table(files: list[str]) -> None:
    results = [json.loads(Path(file).read_text()) for file in files]
    common = set.intersection(*(set(result) for result in results))
    print("| area | mutants |" + "".join(f" killed, {Path(file).stem} |" for file in files))
    print("|---|---|" + "---|" * len(files))
    for area in [*AREAS, "all"]:
        names = [name for name in common if area in ("all", results[0][name]["area"])]
        killed = [sum(result[name]["result"] != "survived" for name in names) for result in results]
        print(f"| {area} | {len(names)} |" + "".join(f" {k} ({k / max(len(names), 1):.0%}) |" for k in killed))
    for name in sorted(common):
        if len({result[name]["result"] == "survived" for result in results}) > 1:
            print(name, *(result[name]["result"] for result in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, help="folder of tests")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--coverage", nargs="*", help="coverage data of these tests")
    parser.add_argument("--areas", nargs="*", choices=AREAS, default=list(AREAS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="2: only every second mutant, and so on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=90, help="CPU seconds of a mutant; five times that by the clock")
    parser.add_argument("--table", nargs="*", help="files of results to compare")
    options = parser.parse_args()
    mutants = [m for m in draw(options.count, options.seed)[:: options.every] if m["area"] in options.areas]
    if options.table:
        return table(options.table)
    executed = read_coverage(options.coverage) if options.coverage else None
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(source, quiet=2)
        os.environ |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        sys.path.insert(0, str(source))
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()
        check = run(select(mutants[0], options.tests.resolve(), executed), options.limit)
        assert check == "survived", "tests fail without a defect"
        for mutant in mutants:
            name = f"{mutant['file']} #{mutant['number']}, {mutant['what']}"
            if name in results:
                continue
            file = source / mutant["file"]
            text, times, start = file.read_text(), file.stat(), time.monotonic()
            tree = ast.parse(text)
            list(changes(tree))[mutant["number"]][2]()
            file.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            result = run(select(mutant, options.tests.resolve(), executed), options.limit)
            file.write_text(text)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled form is valid again
            results[name] = {"area": mutant["area"], "result": result, "seconds": round(time.monotonic() - start, 1)}
            options.out.write_text(json.dumps(results, indent=1))
            print(result, name, results[name]["seconds"], flush=True)


if __name__ == "__main__":
    main()
