"""A Python expression inside the reply, evaluated in a process that has limits on time and memory."""

from __future__ import annotations

import ast
import builtins
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.envs.base import Env, Step, TaskEnv
from assay.rewards import JudgePool
from assay.tasks import Task
from assay.types import Status, UserError, Verdict

MAX_CHARS, MAX_RESULT = 1_000, 200
BUILTINS = (
    "abs all any bool dict divmod enumerate float int len list max min pow range reversed round set sorted str sum "
    "tuple zip"
)
MATH = "ceil comb cos exp factorial floor gcd isqrt lcm log log10 log2 perm pi prod sin sqrt tan"
_NAMES: dict[str, Any] = {name: getattr(builtins, name) for name in BUILTINS.split()}
_NAMES |= {name: getattr(math, name) for name in MATH.split()}
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.IfExp, ast.Call, ast.keyword, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice, ast.Starred),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # of generators and the like: another in every process


@dataclass(frozen=True)
class Evaluator:
    """Expressions in, results out, in the form of a judge: so a JudgePool can run it in its processes.

    No attributes, no imports, no names but numbers' own: what is left can only use up time and memory, which the
    process limits.
    """

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            result = _ADDRESS.sub(">", repr(evaluate(completion)))
        except Exception as error:
            return Verdict(0.0, Status.OK, f"{type(error).__name__}: {error}"[:MAX_RESULT])
        return Verdict(1.0, Status.OK, result if len(result) <= MAX_RESULT else result[: MAX_RESULT - 3] + "...")


def evaluate(text: str) -> Any:
    if len(text) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ValueError(f"{type(node).__name__} is not allowed")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id.startswith("_"):
            raise ValueError(f"{node.id} is not allowed")
    return eval(compile(tree, "expression", "eval"), {"__builtins__": {}, **_NAMES})


class PythonTool(TaskEnv):
    """The policy writes <python>sum(range(10))</python>; <result>45</result> is put in, not trained on.

    The token that ends a call may hold more than its end. With "><" the policy has begun the result: it is completed.
    """

    name = "python"
    inline = True
    stop = ("</python>",)
    _call = re.compile(r"<python>((?:(?!</?python>).)*)</python>(?:(?!</?python>).)*\Z", re.DOTALL)

    def __init__(
        self, task: Task, max_steps: int = 8, timeout_s: float = 2.0, memory_gb: float = 1.0, slow: bool = True
    ) -> None:
        super().__init__(task)
        if max_steps < 1:
            raise UserError("python: max_steps must be at least 1")
        self.max_steps, self.slow = max_steps, slow
        self.pool = JudgePool(Evaluator(), workers=2, timeout_s=timeout_s, memory_gb=memory_gb)

    def step(self, action: str) -> Step:
        return self.step_all([self], [action])[0]

    def step_all(self, episodes: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        """All expressions go to the processes at once."""
        calls = [self._call.search(action) for action in actions]
        found = iter(self.pool.judge([(call[1], "", {}) for call in calls if call]))
        steps = []
        for episode, action, call in zip(episodes, actions, calls, strict=True):
            assert isinstance(episode, PythonTool)
            steps.append(episode.take(action, next(found) if call else None))
        return steps

    def take(self, action: str, found: Verdict | None) -> Step:
        self.said += action
        if found is None and self.stop[0] not in action:
            return self.answered(self.said)
        # A timeout, or a process that died for want of memory, is a result like any other, but not one of judging.
        failure = found and (found.detail or str(found.status)).replace("judging ", "", 1)
        result = "no expression" if found is None else found.parsed or failure
        shown = f"<result>{result}</result>".removeprefix(action.rpartition(self.stop[0])[2])
        self.said += shown
        return shown, 0.0, False, False, {"result": result}

    def close(self) -> None:
        self.pool.close()
