"""The judge of programs: runs the program of a completion with its tests, in disposable processes.

Fields of a problem:
tests         list of tests: Python code that must not raise, or {"call": "f(1)", "expected": JSON value}
setup         code that runs before the tests, such as imports; optional
entry_points  the functions and classes that the program has to define; optional
prefix        code that the completion continues, such as imports, a signature and a docstring; optional
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from assay.rewards.numeric import UnreadableGold
from assay.rewards.verifiers import Extraction
from assay.system.code_runner import ProgramLimits, ProgramResult, ProgramRunner, RunnerLost, start_runner
from assay.system.sandbox import in_worker
from assay.types import Status, UserError, Verdict

CODE_FORMS = ("code-block", "answer-tag", "continuation")
MAX_PROGRAM_CHARS = 100_000
_FENCE = re.compile(r"^([ \t]*)```[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
_UNINDENTED = re.compile(r"^\S", re.MULTILINE)


@dataclass(frozen=True)
class CodeJudge:
    """1.0 if the program passes all tests, else 0.0, or with `partial` the fraction of tests that it passes.

    `extract` is one of CODE_FORMS. Not strict: a completion without code block counts as a whole. `parts` has
    `accuracy`, `format` and `tests`, the fraction of tests passed. `timeout_s` and `memory_mb` apply to all tests of a
    program together.
    """

    extract: str = "code-block"
    strict: bool = True
    timeout_s: float = 3.0
    memory_mb: int = 512
    partial: bool = False
    allow_unconfined: bool = False  # also where the system cannot confine programs

    def __post_init__(self) -> None:
        if self.extract not in CODE_FORMS:
            forms = ", ".join(CODE_FORMS)
            raise UserError(f'a program cannot be extracted as "{self.extract}": choose one of {forms}')
        if not 0 < self.timeout_s <= 600 or self.memory_mb < 64:
            raise UserError("code: timeout_s must be above 0 and at most 600, and memory_mb at least 64")

    def prepare(self) -> None:
        """Start the runner: a strict worker cannot start processes later."""
        with _LOCK:
            _current_runner(self.allow_unconfined)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            tests = read_tests(fields)
        except UnreadableGold as error:
            return Verdict(0.0, Status.ERROR, detail=str(error))
        extraction = extract_program(completion, self.extract, self.strict)
        if not extraction.found:
            return self._verdict(extraction.status, 0.0, 0.0, extraction.detail)
        program = assemble(extraction.text, str(fields.get("prefix") or ""), tests["names"], extraction.form)
        if len(program) > MAX_PROGRAM_CHARS:
            detail = f"the program is longer than {MAX_PROGRAM_CHARS:,} characters"
            return self._verdict(Status.UNPARSABLE, 0.0, 0.0, detail)
        limits = ProgramLimits(self.timeout_s, self.memory_mb)
        result = run_program(program, tests, limits, self.allow_unconfined)
        return self._judge(result, len(tests["tests"]), float(extraction.form == self.extract))

    def _judge(self, result: ProgramResult, count: int, in_form: float) -> Verdict:
        score = sum(result.passed) / count
        if result.stage == "invalid":
            return Verdict(0.0, Status.ERROR, detail=result.detail)
        if result.stage == "syntax":
            return self._verdict(Status.UNPARSABLE, 0.0, in_form, result.detail)
        if result.stage == "timeout":
            detail = f"the program took longer than {self.timeout_s:g} s after {sum(result.passed)} of {count} tests"
            return self._verdict(Status.TIMEOUT, score, in_form, detail)
        if result.stage == "done" and len(result.passed) == count and all(result.passed):
            return self._verdict(Status.OK, 1.0, in_form)
        return self._verdict(Status.WRONG, score, in_form, result.detail)

    def _verdict(self, status: Status, score: float, in_form: float, detail: str = "") -> Verdict:
        reward = score if self.partial and status is not Status.TIMEOUT else float(status is Status.OK)
        return Verdict(reward, status, None, {"accuracy": reward, "format": in_form, "tests": score}, detail)


def read_tests(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of a problem as the runner needs them. Raises UnreadableGold if they are invalid."""
    tests, setup = fields.get("tests"), fields.get("setup") or ""
    if not isinstance(tests, list) or not tests:
        raise UnreadableGold('a code problem needs "tests", a list that is not empty')
    for number, test in enumerate(tests, start=1):
        called = isinstance(test, Mapping) and isinstance(test.get("call"), str) and "expected" in test
        if not called and not isinstance(test, str):
            raise UnreadableGold(f'test {number} must be code, or an object with "call" and "expected"')
    names = fields.get("entry_points") or []
    if not isinstance(setup, str) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnreadableGold('"setup" must be text, and "entry_points" a list of names')
    return {"setup": setup, "tests": tests, "names": names}


def extract_program(completion: str, form: str, strict: bool = True) -> Extraction:
    """Extract the program: the last Python code block, the last <answer> tag, or the continuation of a prefix."""
    block = _last_block(completion)
    if form == "continuation" and (block is None or not completion.lstrip().startswith("```")):
        return _program(_continuation(completion), form)
    if form == "answer-tag":
        start, end = completion.rfind("<answer>"), completion.rfind("</answer>")
        if 0 <= start < end:
            inside = completion[start + len("<answer>") : end]
            inner = _last_block(inside)
            return _program(inside if inner is None else inner[0], form)
        if strict:
            return Extraction(status=Status.NO_ANSWER, detail="no <answer> tag in the completion")
    if block is None and strict:
        return Extraction(status=Status.NO_ANSWER, detail="no ```python code block in the completion")
    if block is None:
        return _program(completion, "")
    text, closed = block
    if not closed and strict:
        return Extraction(status=Status.UNPARSABLE, detail="the last code block is never closed")
    return _program(text, "code-block" if form != "continuation" else form)


def _program(text: str, form: str) -> Extraction:
    if not text.strip():
        return Extraction(status=Status.UNPARSABLE, detail="the program is empty")
    return Extraction(text, form=form)


def _last_block(text: str) -> tuple[str, bool] | None:
    """Return the last block that is marked as Python, or else the last that is not marked, and whether it is closed.

    What follows a program without a mark is often its output.
    """
    blocks: list[tuple[re.Match[str], str, bool]] = []  # opening fence, content, whether it is closed
    start: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if start is None:
            start = fence
            continue
        blocks.append((start, text[start.end() : fence.start()], True))
        start = None
    if start is not None:
        blocks.append((start, text[start.end() :], False))
    blocks = [block for block in blocks if block[0][2].lower() in _PYTHON]
    chosen = [block for block in blocks if block[0][2]] or blocks
    if not chosen:
        return None
    fence, content, closed = chosen[-1]
    return re.sub(f"^{fence[1]}", "", content.removeprefix("\n"), flags=re.MULTILINE), closed


def _continuation(text: str) -> str:
    """Return the body that continues a signature: everything before the next line that is not indented."""
    first, newline, rest = text.partition("\n")
    end = _UNINDENTED.search(rest)
    return first + newline + (rest if end is None else rest[: end.start()])


def assemble(text: str, prefix: str, names: Sequence[str], form: str) -> str:
    """Return the whole program: with what comes before its functions in the prefix, or with all of the prefix."""
    if not prefix or (form != "continuation" and not names):
        return text
    if any(definition_of(name).search(text) for name in names):
        start = min((match.start() for name in names if (match := definition_of(name).search(prefix))), default=0)
        return f"{prefix[:start]}\n{text}"
    return prefix + text if form == "continuation" else f"{prefix}\n{_indented(text)}"


def definition_of(name: str) -> re.Pattern[str]:
    """Return a pattern for the line that defines a function, class or variable."""
    return re.compile(
        rf"^(?:async[ \t]+def|def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*=", re.MULTILINE
    )


def _indented(text: str) -> str:
    """Return a function body indented, if it is not."""
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    return text if first[:1].isspace() else "\n".join(f"    {line}" if line.strip() else line for line in lines)


_LOCK = threading.Lock()
_runner: ProgramRunner | None = None
_owner = 0  # id of the process that started it


def run_program(
    program: str, tests: Mapping[str, Any], limits: ProgramLimits, allow_unconfined: bool = False
) -> ProgramResult:
    """Run a program in the runner of this process. A runner that was lost is replaced once."""
    with _LOCK:
        for last in (False, True):
            try:
                return _current_runner(allow_unconfined).run(program, tests, limits)
            except RunnerLost as error:
                if in_worker():  # which may not start processes: let the pool replace it, and judge the item again
                    os._exit(1)
                _close_runner()
                if last:
                    return ProgramResult("invalid", [], f"the process that runs programs was lost twice: {error}")
    raise AssertionError


def _current_runner(allow_unconfined: bool) -> ProgramRunner:
    global _runner, _owner
    if _runner is None or _owner != os.getpid():
        _runner, _owner = start_runner(allow_unconfined), os.getpid()
        atexit.register(_close_runner)
    return _runner


def _close_runner() -> None:
    global _runner
    runner, _runner = _runner, None
    if runner is None or _owner != os.getpid():
        return
    with suppress(OSError):  # a strict worker may not send signals, but the runner ends with its stdin
        if runner.process.stdin is not None:
            runner.process.stdin.close()
        runner.close()
