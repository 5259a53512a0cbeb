"""Programming problems: Python functions judged by tests. Generated, or read from JSONL in the layouts of this package,
of MBPP and of HumanEval.

A generated problem consists of a start (what the function takes) and operations on numbers, words, texts or
dictionaries, one after the other, whose types fit together. An operation is a sentence and a line of Python, in which
`v` is the value so far; code_operations.toml has all of them. The program and its tests follow from the lines.
"""

from __future__ import annotations

import ast
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.rewards import CodeJudge, Judge
from assay.rewards.code import CODE_FORMS, definition_of, read_tests
from assay.rewards.numeric import UnreadableGold
from assay.tasks.base import UNLIMITED, GeneratedTask, rng_for, split_of
from assay.tasks.sources import DataRow, RowTask, Source, manifest_of, open_source, row_messages, user_message
from assay.types import Prompt, UserError, describe_error

NAME = "solve"  # the function that a program has to define
WORDS = (
    *("apple", "ant", "bear", "boat", "bread", "cat", "cloud", "corn", "dog", "dune", "eagle", "echo", "fig", "fox"),
    *("goat", "grape", "hat", "hill", "ice", "ink", "jar", "kite", "lamp", "level", "moon", "noon", "oak", "onion"),
    *("pear", "pine", "queen", "radar", "rain", "seed", "star", "tent", "tree", "unit", "vase", "wind", "yarn", "zoo"),
)
PERSONS = ("Ann", "Ben", "Clara", "Dan", "Eva", "Finn", "Gus", "Hannah", "Ida", "Jo")


@dataclass(frozen=True)
class CodeOperation:
    """`line` assigns to `v`; {k} and the like in sentence and line are parameters, drawn from `parameters`."""

    takes: str
    gives: str
    sentence: str
    line: str
    parameters: dict[str, Any]  # values: a list, the characters of a text, or {"first": integer, "last": integer}


def _read_operations() -> list[CodeOperation]:
    table = tomllib.loads(Path(__file__).with_name("code_operations.toml").read_text(encoding="utf-8"))
    return [
        CodeOperation(takes, gives, sentence, f"v = {expression}", parameters[0] if parameters else {})
        for takes, by_result in table.items()
        for gives, rows in by_result.items()
        for sentence, expression, *parameters in rows
    ]


OPERATIONS = _read_operations()


def _ints(rng: random.Random, size: int) -> list[int]:
    return [rng.randint(-9, 20) for _ in range(size)]


def _words(rng: random.Random, size: int) -> list[str]:
    pool = rng.sample(WORDS, max(1, size - 1))  # fewer than `size`, so that some occur twice
    return [rng.choice(pool) for _ in range(size)]


def _text(rng: random.Random, size: int) -> str:
    return " ".join(_words(rng, size))


def _number(rng: random.Random, size: int) -> int:
    return rng.randint(1, 10 ** min(3, 1 + size // 2))


def _table(rng: random.Random, size: int) -> dict[str, int]:
    return {name: rng.randint(0, 12) for name in rng.sample(PERSONS, size)}


@dataclass(frozen=True)
class Start:
    """What a function takes: the name of the argument, its description, its type, and a generator of inputs."""

    argument: str
    description: str
    kind: str
    draw: Callable[[random.Random, int], Any]  # with the number of elements


STARTS = (
    Start("numbers", "a list of integers", "ints", _ints),
    Start("words", "a list of lower-case words", "words", _words),
    Start("text", "a string of lower-case words separated by spaces", "text", _text),
    Start("n", "a positive integer", "n", _number),
    Start("scores", "a dictionary from names to integers", "table", _table),
)
MAX_SIZE = 7  # elements of an input
MAX_INPUT_DRAWS = 40  # until the results of inputs differ enough


@dataclass(frozen=True)
class CodeProblem:
    """A problem, without its tests."""

    start: Start
    sentences: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def canonical(self) -> str:
        """What decides its split: everything that defines the function."""
        return " ".join(["code", self.start.argument, *self.sentences])

    @property
    def description(self) -> str:
        argument = self.start.argument
        steps = "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(self.sentences, start=1))
        return (
            f"Write a Python function `{NAME}({argument})`, where `{argument}` is {self.start.description}. "
            "It performs these steps in order and returns the result of the last one. The first step is applied to "
            f"`{argument}`, and each further step to the result of the step before.\n{steps}"
        )

    @property
    def program(self) -> str:
        lines = "".join(f"    {line}\n" for line in self.lines)
        return f"def {NAME}({self.start.argument}):\n    v = {self.start.argument}\n{lines}    return v\n"

    def calls(self, rng: random.Random, count: int) -> list[tuple[str, Any]] | None:
        """Return `count` different calls with their results; None if nearly all results are equal."""
        names: dict[str, Any] = {}
        exec(self.program, names)
        calls: dict[str, Any] = {}
        for turn in range(MAX_INPUT_DRAWS + count):
            value = self.start.draw(rng, (MAX_SIZE, 4, 0 if self.start.kind != "n" else 1, 5)[turn % 4])
            calls.setdefault(f"{NAME}({value!r})", names[NAME](value))
            if len(calls) == count:
                break
        results = [repr(result) for result in calls.values()]
        most_common = max(results.count(result) for result in results)
        return list(calls.items()) if len(calls) == count and most_common <= 0.7 * count else None


def draw_problem(rng: random.Random, steps: int) -> CodeProblem | None:
    """Draw a problem with this number of operations; None if no operation fits the last one."""
    start = rng.choice(STARTS)
    kind, used = start.kind, list[CodeOperation]()
    sentences, lines = [], []
    for _ in range(steps):
        possible = [operation for operation in OPERATIONS if operation.takes == kind and operation not in used]
        if not possible:
            return None
        operation = rng.choice(possible)
        sentence, line = operation.sentence, operation.line
        for name, given in operation.parameters.items():
            values = range(given["first"], given["last"] + 1) if isinstance(given, dict) else given
            value = str(rng.choice(values))
            sentence, line = sentence.replace(f"{{{name}}}", value), line.replace(f"{{{name}}}", value)
        used.append(operation)
        sentences.append(sentence)
        lines.append(line)
        kind = operation.gives
    return CodeProblem(start, tuple(sentences), tuple(lines))


INSTRUCTIONS = {
    "code-block": "Put the whole program in one ```python code block.",
    "answer-tag": "Put the whole program inside <answer> </answer> tags.",
    "continuation": "",
}
SOLUTIONS = {"code-block": "```python\n%s\n```", "answer-tag": "<answer>\n%s\n</answer>", "continuation": "%s"}
N_EXAMPLES = 2
MAX_EXAMPLE = 150  # characters; longer calls and results are hidden tests, if there are enough shorter ones
MAX_DRAWS = 20_000  # after which a split counts as empty
LAYOUTS = (
    '"prompt" and "tests", or the columns of MBPP ("text" or "prompt", "code", "test_list") or HumanEval ("prompt", '
    '"test", "entry_point")'
)


class Code(GeneratedTask):
    """Generated and unlimited; with `path`, read from rows."""

    name = "code"
    judge_kind = "code"

    def __init__(
        self,
        path: str | None = None,
        form: str | None = None,
        partial: bool = False,
        timeout_s: float = 3.0,
        memory_mb: int = 512,
        allow_unconfined: bool = False,
        instruction: str | None = None,
        steps: tuple[int, int] = (1, 3),
        tests: int = 8,
        shown_tests: int = 1,
        val_size: int | None = None,
        seed: int = 0,
        train_size: int = UNLIMITED,
        eval_size: int = UNLIMITED,
    ) -> None:
        if not 1 <= steps[0] <= steps[1] <= 6:
            raise UserError(f"code: steps must be a range within 1 to 6, such as [1, 3], not {list(steps)}")
        if not 2 <= tests <= 20 or shown_tests < 0 or min(train_size, eval_size) < 1:
            raise UserError(
                "code: tests must be from 2 to 20, shown_tests at least 0, train_size and eval_size at least 1"
            )
        self.form = form or manifest_of(path).get("extract") or "code-block"
        self._judge = CodeJudge(self.form, True, timeout_s, memory_mb, partial, allow_unconfined)  # checks its settings
        if self.form == "continuation" and path is None:
            raise UserError("code: generated problems have no prefix to continue: use form = code-block or answer-tag")
        self.default_extract = self.form
        self.steps, self.n_tests, self.seed = steps, tests, seed
        self.train_size, self.eval_size = train_size, eval_size
        self.instruction = INSTRUCTIONS[self.form] if instruction is None else instruction
        if path is not None:
            self.stored = StoredCode(open_source(path), self.form, self.instruction, shown_tests, val_size, seed)
            self.has_all = self.stored.has_all

    def problem(self, split: str, index: int) -> Prompt:
        rng = rng_for("code", self.seed, split, index)
        for _ in range(MAX_DRAWS):
            problem = draw_problem(rng, rng.randint(*self.steps))
            if problem is None or split_of(problem.canonical) != split:
                continue
            calls = problem.calls(rng, self.n_tests + N_EXAMPLES)
            if calls is not None:
                break
        else:
            raise UserError(f"code: these settings allow no problem in the {split} split: allow more steps")
        calls.sort(key=lambda call: len(f"{call[0]}{call[1]!r}") > MAX_EXAMPLE)  # stable: otherwise in the order drawn
        examples = "\n".join(f"{call} returns {result!r}" for call, result in calls[:N_EXAMPLES])
        question = f"{problem.description}\nExamples:\n{examples}"
        return Prompt(
            id=f"code/{split}/{index}",
            messages=user_message(question, self.instruction),
            answer=problem.program,
            solution=SOLUTIONS[self.form] % problem.program.rstrip("\n"),
            fields={
                "tests": [{"call": call, "expected": result} for call, result in calls[N_EXAMPLES:]],
                "entry_points": [NAME],
            },
        )

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return replace(self._judge, extract=extract or self.form, strict=strict)

    def gold_completion(self, prompt: Prompt) -> str:
        return prompt.solution or ""


class StoredCode(RowTask):
    """Problems from rows; the columns of a row decide its layout."""

    name = "code"

    def __init__(
        self, source: Source, form: str, instruction: str, shown_tests: int, val_size: int | None, seed: int
    ) -> None:
        super().__init__(source, val_size, seed, instruction)
        self.form, self.shown_tests = form, shown_tests

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        layouts = {"tests": self._assay, "test_list": self._mbpp, "entry_point": self._humaneval}
        layout = next((make for column, make in layouts.items() if row.values.get(column) is not None), None)
        if layout is None:
            raise UserError(f"{row.where} is not a code problem: it needs {LAYOUTS}")
        question, program, fields = layout(row)
        check_tests(fields, row.where)
        if self.form == "continuation" and not fields.get("prefix"):
            raise UserError(f'{row.where} has no "prefix" to continue: use another form')
        identifier = row.values.get("id", row.values.get("task_id", f"{split}/{row.key}"))
        return Prompt(
            id=str(identifier) if str(identifier).startswith("code/") else f"code/{identifier}",
            messages=row_messages(row, question, self.instruction),
            answer=program or "",
            solution=None if program is None else self._solution(program),
            fields={name: value for name, value in fields.items() if value},
        )

    def _solution(self, program: str) -> str:
        return program if "```" in program else SOLUTIONS[self.form] % program.strip("\n")

    def _assay(self, row: DataRow) -> tuple[str, str | None, dict[str, Any]]:
        question = "" if row.values.get("messages") else row.text("prompt", "question", "problem")
        names = row.values.get("entry_points") or []
        if single := row.values.get("entry_point"):
            names = [single]
        fields = {name: row.values.get(name) for name in ("tests", "setup", "prefix")}
        solution = row.values.get("solution")
        return question, None if solution is None else str(solution), {**fields, "entry_points": names}

    def _mbpp(self, row: DataRow) -> tuple[str, str | None, dict[str, Any]]:
        tests, program = row.column("test_list"), row.text("code")
        if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
            raise UserError(f'{row.where}: "test_list" must be a list of assert statements')
        imports = row.values.get("test_imports") or []
        setup = "\n".join([*imports, row.values.get("test_setup_code") or ""])
        question = row.text("text", "prompt")
        if self.shown_tests and tests:
            question += "\nThe program must pass tests such as:\n" + "\n".join(tests[: self.shown_tests])
        used = {node.id for test in tests for node in _nodes(test, row.where) if isinstance(node, ast.Name)}
        names = [name for name in _defined(program, row.where) if name in used]
        if not names:
            raise UserError(f'{row.where}: no test in "test_list" uses a function of "code"')
        return question, program, {"tests": tests, "setup": setup, "entry_points": names}

    def _humaneval(self, row: DataRow) -> tuple[str, str | None, dict[str, Any]]:
        prefix, test, name = row.text("prompt"), row.text("test"), row.text("entry_point")
        signature = definition_of(name).search(prefix)
        if signature is None:
            raise UserError(f'{row.where}: "prompt" does not define the entry point {name}')
        setup, tests = split_check(test, name, row.where)
        helpers = prefix[: signature.start()]  # tests use them as they are here, whatever a program defines
        fields = {"tests": tests, "setup": f"{helpers}\n{setup}", "entry_points": [name], "prefix": prefix}
        body = row.values.get("canonical_solution")
        program = None if body is None else str(body) if self.form == "continuation" else prefix + str(body)
        if self.form == "continuation":
            return prefix, program, fields
        return f"Complete this Python function.\n```python\n{prefix.rstrip()}\n```", program, fields


def check_tests(fields: Mapping[str, Any], where: str) -> None:
    """Raise a UserError if a problem has no valid tests."""
    try:
        tests = read_tests(fields)
    except UnreadableGold as error:
        raise UserError(f"{where}: {error}") from None
    _nodes(tests["setup"], f"{where}, set-up of the tests")
    for number, test in enumerate(tests["tests"], start=1):
        _nodes(test if isinstance(test, str) else test["call"].strip(), f"{where}, test {number}")


def split_check(test: str, name: str, where: str) -> tuple[str, list[str]]:
    """Split the function `check(candidate)` of HumanEval into set-up code and tests, one per assert statement.

    Statements before an assert belong to its test; all tests have one namespace.
    """
    tree = _parse(test, where)
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if len(checks) != 1 or len(checks[0].args.args) != 1:
        raise UserError(f'{where}: "test" must define one function check(candidate)')
    check = checks[0]
    others = [ast.unparse(node) for node in tree.body if node is not check and not _calls_check(node)]
    setup = "\n".join([*others, f"{check.args.args[0].arg} = {name}"])
    tests, pending = [], list[str]()
    for statement in check.body:
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant):
            continue  # some problems have `assert True`
        pending.append(ast.unparse(statement))
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            tests.append("\n".join(pending))
            pending = []
    if not tests or any(isinstance(node, ast.Return) for node in check.body):
        raise UserError(f'{where}: the function check of "test" must consist of assert statements')
    return setup, tests


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"


def _defined(program: str, where: str) -> list[str]:
    """Return the names that a program defines."""
    names: list[str] = []
    for node in _parse(program, f'{where}, "code"').body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def _nodes(code: str, where: str) -> list[ast.AST]:
    return list(ast.walk(_parse(code, where)))


def _parse(code: str, where: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{where} is not valid Python: {describe_error(error)}") from None


assert set(INSTRUCTIONS) == set(SOLUTIONS) == set(CODE_FORMS)
