"""Run folders with given rollouts, written by the functions that training uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.runs import Run, write_rollouts
from assay.text import char_tokenizer
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, Verdict
from assay.web.data import RunView
from assay.web.folder import RunFolder
from assay.web.index import RunIndex
from assay.web.table import RolloutsQuery

CONFIG = 'seed = 3\n[task]\nname = "abacus"\n[model]\nsource = "preset:nano"\n[train]\nsteps = 9\n'
# Text that would do something if it were interpreted, or that is hard to store.
HOSTILE = (
    "<script>alert(1)</script>",
    "</textarea><img src=x onerror=alert(1)>",
    "'; DROP TABLE files; --",
    "nul \0 and \x1b[31m escape",
    "lone \ud800 surrogate",
    "\u202egnp.exe",
    "null\u2028separator",
    '"quotes" \\ backslash \\u0000 %s {x}',
    "日本語 ÄÖÜ ß İ ﬁ 👩‍👩‍👧",
    "",
)
_tokenizer = char_tokenizer()


def answer(
    prompt: Prompt,
    sample: int,
    text: str,
    status: Status = Status.WRONG,
    *,
    advantage: float = 0.5,
    finish: Finish = Finish.STOP,
    reward: float | None = None,
    detail: str = "",
) -> Rollout:
    """A rollout with one turn, in tokens of one character."""
    ids = [*_tokenizer.encode(text), _tokenizer.eos_id or 0]
    context = _tokenizer.encode(prompt.question)
    logprobs = [-0.25 * (place % 7) for place in range(len(ids))]
    completion = Completion(ids, logprobs, logprobs, finish, version=3, kept_mass=1.0, entropy=0.5)
    value = float(status is Status.OK) if reward is None else reward
    verdict = Verdict(value, status, text[-1:], {"accuracy": value}, detail)
    turn = Turn(context, completion, text)
    trainer = [value - 0.01 for value in logprobs]
    return Rollout(prompt, sample, [turn], verdict, value, advantage, trainer_logprobs=trainer)


def prompt_of(name: str, question: str = "") -> Prompt:
    return Prompt(name, ({"role": "user", "content": question or f"what is {name}?"},), "42", "so 42", {"level": 1})


def group_of(name: str, statuses: Sequence[str], text: str = "answer") -> Group:
    """Answers "text 0", "text 1", ... with the given verdicts."""
    prompt = prompt_of(name)
    return Group(prompt, [answer(prompt, n, f"{text} {n}", Status(status)) for n, status in enumerate(statuses)])


def make_run(runs: Path, name: str = "one", steps: int = 0) -> Path:
    with Run.create(runs, name, CONFIG) as run:
        for step in range(1, steps + 1):
            run.log(step, {"reward/mean": step / 4, "time/wall": 10.0 * step, "turns/mean": 1.0})
        return run.path


def standard_run(runs: Path) -> Path:
    """Three steps with the prompts p1 and p2, and evaluations of two questions."""
    path = make_run(runs, steps=3)
    write_rollouts(path, 1, [group_of("p1", ["wrong", "wrong", "ok"]), group_of("p2", ["ok", "ok", "no_answer"])])
    write_rollouts(path, 2, [group_of("p1", ["ok", "wrong"], "Second Try")])
    write_rollouts(path, 3, [group_of("p1", ["ok", "ok"]), group_of("p2", ["wrong", "ok"])])
    for step, label, verdicts in ((0, "before", ("ok", "wrong")), (3, "after", ("wrong", "ok"))):
        groups = [group_of(f"q{n}", [status], label) for n, status in enumerate(verdicts)]
        write_rollouts(path, step, groups, "eval", split=f"{label}-test")
    return path


def listed(view: RunView, **options: Any) -> dict[str, Any]:
    """A page of rollouts."""
    return view.rollouts(RolloutsQuery(**options))


def updated(path: Path) -> RunIndex:
    """The complete index of a run."""
    index = RunIndex(RunFolder(path))
    while index.update():
        pass
    return index
