"""The judge of programs: extraction, verdicts, and programs that attack it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from assay.rewards import CodeJudge, JudgePool, RewardMix
from assay.rewards.code import assemble, extract_program
from assay.types import Status, UserError, Verdict

SQUARE = {"tests": ["assert f(2) == 4", {"call": "f(3)", "expected": 9}], "entry_points": ["f"]}
RIGHT = "def f(x):\n    return x * x"


pytestmark = pytest.mark.usefixtures("confined")


def block(program: str) -> str:
    return f"Here it is.\n```python\n{textwrap.dedent(program)}\n```\n"


def judge(program: str, fields: dict[str, Any] = SQUARE, **settings: Any) -> Verdict:
    return CodeJudge(**{"timeout_s": 10.0, **settings})(block(program), "", fields)


def test_program_that_passes_all_tests_is_correct() -> None:
    assert judge(RIGHT) == Verdict(1.0, Status.OK, None, {"accuracy": 1.0, "format": 1.0, "tests": 1.0})


def test_partial_credit_is_the_fraction_of_tests() -> None:
    assert judge("def f(x): return x + 2").reward == 0.0
    verdict = judge("def f(x): return x + 2", partial=True)
    assert (verdict.reward, verdict.status, verdict.parts["tests"]) == (0.5, Status.WRONG, 0.5)
    assert verdict.detail == "f(3): 5 instead of 9"
    mixed = RewardMix(CodeJudge(partial=True), wrong=-1.0)(block("def f(x): return x + 2"), "", SQUARE)
    assert mixed.reward == 0.0 and mixed.parts["tests"] == 0.5


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("def f(x:", Status.UNPARSABLE, "SyntaxError"),
        ("x = '\0'", Status.UNPARSABLE, "null bytes"),
        ("(" * 5000, Status.UNPARSABLE, "nested"),
        (RIGHT + "\n" + "#" * 100_000, Status.UNPARSABLE, ""),
        ("x = " + "-" * 50_000 + "1", Status.UNPARSABLE, ""),
        ("1 / 0", Status.WRONG, "ZeroDivisionError"),
        ("def g(x): return x * x", Status.WRONG, "does not define f"),
        ("def f(x): return None", Status.WRONG, "f(2): None instead of 4"),
        ("def f(x): return f(x)", Status.WRONG, "RecursionError"),
        ("def f(x): yield 4", Status.WRONG, "<generator> instead of 4"),
        ("def f(x): return float('nan')", Status.WRONG, "nan instead of 4"),
        ("def f(x):\n    v = [x]\n    v.append(v)\n    return v", Status.WRONG, "nested"),
        ("def f(x): return input()", Status.WRONG, "EOFError"),
    ],
)
def test_verdicts_on_programs_that_fail(program: str, status: Status, detail: str) -> None:
    verdict = judge(program)
    assert verdict.status is status and verdict.reward == 0.0
    assert detail in verdict.detail and "\n" not in verdict.detail


LIAR = "def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None"
HOSTILE = {
    # values that claim to be equal to everything
    "object equal to all": f"class E:\n    {LIAR}\ndef f(x): return E()",
    "int equal to all": f"class E(int):\n    {LIAR}\ndef f(x): return E(0)",
    "list equal to all": f"class E(list):\n    {LIAR}\ndef f(x): return E()",
    "class equal to all": """
        class M(type):
            def __eq__(cls, other): return True
        class f(metaclass=M):
            def __init__(self, x): pass
    """,
    # ending early
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "os._exit": "import os\ndef f(x): os._exit(0)",
    "kills its group": "import os\ndef f(x): os.kill(0, 9)",
    "segmentation fault": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "endless recursion in C": """
        import sys
        sys.setrecursionlimit(10**9)
        class A:
            def __repr__(self): return repr(self)
        def f(x): return repr(A())
    """,
    # using too much
    "memory bomb": "def f(x):\n    v = []\n    while True: v.append(bytearray(10**7))",
    "raised memory limit": """
        import resource
        def f(x):
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            return x * x
    """,
    "fork bomb": "import os\ndef f(x):\n    while True: os.fork()",
    "thread bomb": """
        import threading, time
        def f(x):
            while True: threading.Thread(target=time.sleep, args=(9,)).start()
    """,
    "programs": "import subprocess\ndef f(x): return int(subprocess.check_output(['echo', '4']))",
    "huge output": "import sys, os\nfor n in range(200): os.write(1, b'x' * 10**6)\ndef f(x): print('x' * 10**7)",
    "many objects": "def f(x): return [object() for _ in range(3 * 10**5)]",
    # files and network
    "reads a file": "def f(x): return open('/etc/passwd').read()",
    "reads this package": "def f(x): return open({source!r}).read()",
    "reads /proc": "def f(x): return open('/proc/1/environ').read()",
    "writes a file": "def f(x): open('/tmp/written_by_a_program', 'w').write('x')",
    "imports this package": "import importlib\ndef f(x): return importlib.import_module('assay.tasks.code').__file__",
    "socket": "import socket\ndef f(x): socket.create_connection(('127.0.0.1', 9), 1)",
    # attacks on the processes that judge
    "kills its parent": "import os\ndef f(x): os.kill(os.getppid(), 9)",
    "kills all": "import os\ndef f(x): os.kill(-1, 9)",
    "writes to all descriptors": """
        import os, json, struct
        payload = json.dumps({"kind": "report", "stage": "done", "passed": [True, True], "detail": ""}).encode()
        for n in range(64):
            try: os.write(n, struct.pack("<Q", len(payload)) + payload)
            except OSError: pass
    """,
    "replies to requests of the future": """
        import os, json, struct
        def reply(**message):
            payload = json.dumps(message).encode()
            for n in range(3, 64):
                try: os.write(n, struct.pack("<Q", len(payload)) + payload)
                except OSError: pass
        reply(kind="loaded")
        for n in range(9): reply(kind="value", value={"object": [0, "x"]}, changed={})
        def f(x): return x + x
    """,
    "malformed replies": """
        import os
        for n in range(3, 64):
            try: os.write(n, b"?" * 64)
            except OSError: pass
    """,
    "closes all descriptors": "import os\nos.closerange(0, 64)\ndef f(x): return 4",
    "patches json and builtins": """
        import builtins, json, sys
        json.JSONEncoder.encode = json.dumps = lambda *a, **k: '{"kind": "report", "passed": [true, true]}'
        builtins.compile = builtins.eval = builtins.exec = lambda *a, **k: True
        builtins.isinstance = lambda *a: True
        for module in list(sys.modules): sys.modules[module] = None
        def f(x): return 5
    """,
    "patches the harness": """
        import sys
        from assay.system import harness, plain, messages
        plain.difference = lambda *a: ""
        harness.TestSession.run = lambda *a: {"kind": "report", "stage": "done", "passed": [True, True], "detail": ""}
        def f(x): return 5
    """,
    "searches the expected values": """
        import gc
        def f(x):
            texts = [o for o in gc.get_objects() if isinstance(o, dict) and "expected" in o]
            return texts[0]["expected"] if texts else -1
    """,
    "replaces names of the harness": "def difference(*a): return ''\nAssertionError = passed = f = lambda x: 1 < 2",
    "atexit": "import atexit\natexit.register(print, 'x' * 1000)\ndef f(x): raise KeyboardInterrupt",
    "property named __class__": "class C:\n    __class__ = int\n    def __index__(s): return 4\ndef f(x): return C()",
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="programs are confined on Linux only")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_program_gets_no_reward_and_affects_no_other(name: str) -> None:
    source = Path(sys.modules[CodeJudge.__module__].__file__ or "")
    assert source.is_file()
    program = HOSTILE[name].replace("{source!r}", repr(str(source)))
    verdict = judge(program)
    assert verdict.status is Status.WRONG and verdict.reward == 0.0 and not verdict.parts["tests"]
    assert verdict.detail
    assert judge(RIGHT).correct
    assert not Path("/tmp/written_by_a_program").exists()


ENDLESS = {
    "destructor": """
        class D:
            def __del__(self):
                while True: pass
        def f(x): raise ValueError(D() is None)
    """,
    "loop": "while True: pass",
    "sleep": "import time\ndef f(x): time.sleep(100)",
    "catches everything": """
        import signal
        for n in range(1, 65):
            try: signal.signal(n, lambda *a: None)
            except (OSError, ValueError): pass
        while True:
            try:
                while True: pass
            except BaseException: pass
    """,
    "slow compilation": "x = " + "+".join(["9**9**9"] * 2) + "\ndef f(x): return 9**9**9",
    "regular expression": "import re\ndef f(x): return re.match('(a+)+b', 'a' * 60)",
    "endless generator": "import itertools\ndef f(x): return (0 for _ in itertools.count())",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_program_times_out_and_affects_no_other(name: str) -> None:
    fields = {"tests": ["assert list(f(2)) == []" if name == "endless generator" else "assert f(2) == 4"]}
    verdict = judge(ENDLESS[name], fields, timeout_s=10.0 if name == "endless generator" else 0.4)
    if name == "endless generator":
        assert verdict.status is Status.WRONG and "more than 100,000 elements" in verdict.detail
    else:
        assert verdict.status is Status.TIMEOUT and "longer than 0.4 s" in verdict.detail
    assert verdict.reward == 0.0 and judge(RIGHT).correct


def test_tests_see_plain_values() -> None:
    program = """
        from collections import Counter
        LIMIT = 3
        def counts(text): return Counter(text)
        def sort(values): values.sort()
        def numbers(n): return (i for i in range(n))
        class Stack:
            def __init__(self): self.items = []
            def push(self, item): self.items.append(item); return self
            def __len__(self): return len(self.items)
    """
    tests = [
        "assert counts('aab') == {'a': 2, 'b': 1} and LIMIT == 3",
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
        "try:\n    sort(7)\nexcept AttributeError as error:\n    assert 'sort' in str(error)\nelse:\n    assert False",
        "stack = Stack()\nassert not stack\nassert len(stack.push(1).push(2)) == 2 and stack.items[1] == 2",
        "assert list(numbers(3)) == [0, 1, 2] and math.isclose(sum(numbers(4)), 6)",
    ]
    assert judge(program, {"tests": tests, "setup": "import math"}).correct


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        *(("(1, [2])", [1, [2]], True), ("1", 1.0, True), ("0.1 + 0.2", 0.3, True), ("0.31", 0.3, False)),
        *(("1.0", 1, False), ("True", 1, False), ("1", True, False), ("'1'", 1, False), ("[1, 2, 3]", [1, 2], False)),
        *(("{'a': [None]}", {"a": [None]}, True), ("{'a': 1, 'b': 2}", {"a": 1}, False), ("{1: 2}", {"1": 2}, False)),
        *(("{1, 2}", [1, 2], False), ("10**400", 1e300, False)),
    ],
)
def test_expected_values_are_compared_with_their_types(value: str, expected: Any, equal: bool) -> None:
    verdict = judge(f"def f(): return {value}", {"tests": [{"call": "f()", "expected": expected}]})
    assert verdict.correct is equal and bool(verdict.detail) is not equal


def test_program_cannot_replace_names_of_the_tests() -> None:
    program = "def f(x): return [1]\ndef set(x): return 5\ndef len(x): return 3\nmath = None"
    fields = {"tests": ["assert set(f(1)) == {2}", "assert len(f(1)) == 3", "assert math.floor(1.5) == 1"]}
    verdict = judge(program, {**fields, "setup": "import math"}, partial=True)
    assert verdict.parts["tests"] == pytest.approx(1 / 3)
    assert judge("def sum(a, b): return 6", {"tests": ["assert sum(10, 15) == 6"], "entry_points": ["sum"]}).correct


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({}, 'needs "tests"'),
        ({"tests": []}, 'needs "tests"'),
        ({"tests": [3]}, "test 1 must be code"),
        ({"tests": [{"call": "f(1)"}]}, "test 1 must be code"),
        ({"tests": ["assert f("]}, "the tests are invalid: SyntaxError"),
        ({"tests": ["assert f(1)"], "setup": "import nothing_of_this_name"}, "the set-up of the tests failed"),
        ({"tests": ["assert f(1)"], "entry_points": "f"}, "a list of names"),
    ],
)
def test_invalid_tests_are_an_error_of_the_problem(fields: dict[str, Any], detail: str) -> None:
    verdict = judge(RIGHT, fields)
    assert verdict.status is Status.ERROR and detail in verdict.detail
    assert judge(RIGHT).correct


def test_tests_that_do_not_end_time_out() -> None:
    assert judge(RIGHT, {"tests": ["while True: pass"]}, timeout_s=0.2).status is Status.TIMEOUT
    assert "use plain values" in judge(RIGHT, {"tests": ["f(lambda: 1)"]}).detail
    assert judge(RIGHT, {"tests": ["import os; os._exit(0)"]}).status is Status.ERROR
    assert judge(RIGHT).correct


@pytest.mark.parametrize(
    ("completion", "form", "strict", "program"),
    [
        ("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```", "code-block", True, "x = 2\n"),
        ("```\nx = 1\n```\n```text\noutput\n```", "code-block", True, "x = 1\n"),
        ("```python\nx = 1\n```\nOutput:\n```\n2\n```", "code-block", True, "x = 1\n"),
        ("1. Do:\n   ```python\n   if x:\n       y()\n   ```", "code-block", True, "if x:\n    y()\n"),
        ("```python\nx = 1\n", "code-block", True, None),
        ("```python\nx = 1\n", "code-block", False, "x = 1\n"),
        ("x = 1", "code-block", True, None),
        ("x = 1", "code-block", False, "x = 1"),
        ("```python\n\n```", "code-block", True, None),
        ("<answer>x = 1</answer>", "answer-tag", True, "x = 1"),
        ("<answer>\n```python\nx = 1\n```\n</answer>", "answer-tag", True, "x = 1\n"),
        ("```python\nx = 1\n```", "answer-tag", True, None),
        ("    return 1\n\n    # end\n\nprint(f())", "continuation", True, "    return 1\n\n    # end\n\n"),
        ("```python\ndef f(): return 1\n```", "continuation", True, "def f(): return 1\n"),
    ],
)
def test_program_is_extracted(completion: str, form: str, strict: bool, program: str | None) -> None:
    extraction = extract_program(completion, form, strict)
    assert (extraction.text if extraction.found else None) == program
    assert extraction.found or extraction.detail


PREFIX = 'import math\n\ndef g(x):\n    return x\n\ndef f(x):\n    """Double."""\n'


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("    return g(2 * x)\n", "continuation"),
        ("def f(x):\n    return g(2 * x)\n", "continuation"),
        ("def f(x):\n    return math.floor(2 * g(x))\n", "code-block"),
        ("return g(2 * x)\n", "code-block"),
        ("    return g(2 * x)\n", "code-block"),
    ],
)
def test_program_is_completed_by_the_prefix(text: str, form: str) -> None:
    names: dict[str, Any] = {}
    exec(assemble(text, PREFIX, ["f"], form), names)
    assert names["f"](4) == 8


def test_settings_are_checked() -> None:
    for settings in ({"extract": "boxed"}, {"timeout_s": 0}, {"memory_mb": 1}):
        with pytest.raises(UserError):
            CodeJudge(**settings)  # type: ignore[arg-type]


def test_judge_pool_runs_programs() -> None:
    programs = [RIGHT, "import os\nos.fork()", RIGHT, "while True: pass", RIGHT]
    with JudgePool(RewardMix(CodeJudge(timeout_s=0.5)), workers=1, timeout_s=60.0) as pool:
        verdicts = pool.judge([(block(program), "", SQUARE) for program in programs])
    statuses = [verdict.status for verdict in verdicts]
    assert statuses == [Status.OK, Status.WRONG, Status.OK, Status.TIMEOUT, Status.OK]
