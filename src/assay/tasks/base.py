"""The task interface: prompts by split, a default judge, checks of gold answers and of overlap between splits."""

from __future__ import annotations

import hashlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, overload

from assay.rewards import CodeJudge, CountdownJudge, Judge, MathJudge
from assay.rewards.judge import judged_fields
from assay.rewards.verifiers import check_extractor
from assay.system.awaiting import resolve, together
from assay.types import Prompt, UserError, Verdict, describe_user_error, plural

SPLITS = ("train", "validation", "test")
ALL = "all"  # a further split: every row of a single file or list
UNLIMITED = 2**31  # the length of a generated split
MAX_REJECTED = 256  # generated problems that a filter may reject in a row
ANSWER_FORMS = {"boxed": "\\boxed{%s}", "hash": "#### %s", "answer-tag": "<answer>%s</answer>", "last-number": "%s"}
PROMPT_EXAMPLE = 'Prompt("ID", ({"role": "user", "content": QUESTION},), answer=ANSWER)'
BOXED_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


class NoSuchSplit(UserError):
    """The source of a task has no such split."""


def _with_user_errors(prompts: Callable[[Any, str], Sequence[Prompt]]) -> Callable[[Any, str], Sequence[Prompt]]:
    """Wrap `prompts`, which may be a user's code: exceptions and wrong results become a UserError."""

    @wraps(prompts)
    def guarded(task: Task, split: str) -> Sequence[Prompt]:
        call = f'prompts("{split}") of the task {task.name}'
        with user_errors(f"{call} failed"):
            return _check_prompts(prompts(task, split), call)

    return guarded


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Convert an exception of a user's code to a UserError that begins with `what`; a UserError stays as it is."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {describe_user_error(error)}") from error


def _check_prompts(prompts: Any, call: str) -> Sequence[Prompt]:
    """Return what a user's `prompts` returned; raise a UserError unless it is a sequence of Prompts."""
    if isinstance(prompts, LazyPrompts):
        return prompts  # checks its items when they are generated
    is_sequence = hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")
    if not is_sequence or isinstance(prompts, str | bytes | Mapping):
        raise UserError(f"{call} must return a list of Prompts, not {type(prompts).__name__}")
    for index, prompt in enumerate(prompts if isinstance(prompts, list | tuple) else prompts[:1]):
        _check_prompt(prompt, f"{call} must return Prompts, but item {index}")
    return prompts


def _check_prompt(prompt: Any, what: str) -> Prompt:
    if not isinstance(prompt, Prompt):
        raise UserError(f"{what} is {prompt!r:.60}: write {PROMPT_EXAMPLE}, with Prompt from assay.types")
    if wrong := _wrong_field(prompt):
        raise UserError(f"{what} has {wrong}: write {PROMPT_EXAMPLE}, where ID, QUESTION and ANSWER are strings")
    return prompt


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _wrong_field(prompt: Prompt) -> str:
    """The first field of a prompt whose value has a wrong type; empty if there is none."""
    if not isinstance(prompt.id, str):
        return f"the id {prompt.id!r:.60}"
    if not isinstance(prompt.messages, tuple | list) or not prompt.messages:
        return f"the messages {prompt.messages!r:.60}"
    for message in prompt.messages:
        if not is_message(message):
            return f"the message {message!r:.60}"
    if not isinstance(prompt.answer, str):
        return f"the answer {prompt.answer!r:.60} of type {type(prompt.answer).__name__}"
    if not isinstance(prompt.solution, str | None):
        return f"the solution {prompt.solution!r:.60} of type {type(prompt.solution).__name__}"
    return ""


class Task(ABC):
    """A set of problems. Subclasses define `prompts`; the defaults of the rest suit numbers as answers."""

    name: str = "task"
    default_extract: str = "boxed"
    judge_kind: str = "math"  # or "countdown", "code"
    instruction: str = ""  # appended to every question
    has_all: bool = False  # whether there is a split "all": true for a single file or list

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "prompts" in cls.__dict__:
            cls.prompts = _with_user_errors(cls.prompts)  # type: ignore[assignment,method-assign]

    @abstractmethod
    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return the problems of "train", "validation" or "test", which are disjoint.

        A task that reads a single file or list returns all of it as "all".
        """

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        """Return the default judge; `extract` overrides the form of the final answer."""
        return named_judge(self.judge_kind, extract or self.default_extract, strict)

    def gold(self, row: Mapping[str, Any]) -> str:
        """Return the gold answer of a raw row."""
        return str(row["answer"])

    def gold_completion(self, prompt: Prompt) -> str:
        """Return a completion that the judge must find correct."""
        return prompt.solution if prompt.solution is not None else state_answer(prompt.answer, self.default_extract)

    def bare_question(self, prompt: Prompt) -> str:
        """Return the question without the instruction."""
        return prompt.question.removesuffix(f"\n{self.instruction}")


def named_judge(kind: str, extract: str, strict: bool = True) -> Judge:
    judges: dict[str, type[MathJudge | CountdownJudge | CodeJudge]]
    judges = {"math": MathJudge, "countdown": CountdownJudge, "code": CodeJudge}
    if kind not in judges:
        raise UserError(f'unknown judge "{kind}": use math, countdown, code, or a function such as my_file.py:reward')
    return judges[kind](extract=extract, strict=strict)


class GeneratedTask(Task):
    """A task that generates each problem from its split and index. Sizes are fields or attributes of subclasses."""

    train_size: int
    eval_size: int  # of validation and of test each
    stored: Task | None = None  # a task with problems from files, used instead

    @abstractmethod
    def problem(self, split: str, index: int) -> Prompt:
        """Return a problem, which depends only on the settings, the split and the index."""

    def size(self, split: str) -> int:
        return self.train_size if split == "train" else self.eval_size

    def prompts(self, split: str) -> Sequence[Prompt]:
        if self.stored is not None:
            return self.stored.prompts(split)
        check_split(split)
        return LazyPrompts(partial(self.problem, split), self.size(split))


class LazyPrompts(Sequence[Prompt]):
    """Prompts that are generated from their index on access; slices are lazy too."""

    rejected = 0  # number of problems that a filter has rejected so far

    def __init__(self, make: Callable[[int], Prompt], indices: int | range) -> None:
        self._make = make
        self._indices = range(indices) if isinstance(indices, int) else indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> LazyPrompts: ...
    def __getitem__(self, index: int | slice) -> Prompt | LazyPrompts:
        if isinstance(index, slice):
            return LazyPrompts(self._make, self._indices[index])
        number = self._indices[index]
        with user_errors(f"problem {number} could not be generated"):
            return _check_prompt(self._make(number), f"problem {number} must be a Prompt, but it")


class FilteredPrompts(LazyPrompts):
    """Endless problems without those that `keep` rejects. A problem from the end of the split replaces each of them, so
    that a problem still depends on its index only.
    """

    def __init__(self, prompts: Sequence[Prompt], keep: Callable[[Prompt], bool], rule: str) -> None:
        """`rule`: what `keep` requires, for an error message."""
        self.prompts, self.keep, self.rule = prompts, keep, rule
        super().__init__(self._kept, len(prompts))

    def _kept(self, index: int) -> Prompt:
        size = len(self.prompts)
        last = size - 1 - index * MAX_REJECTED
        for number in (index, *range(last, last - MAX_REJECTED, -1)):
            prompt = self.prompts[number % size]
            if self.keep(prompt):
                return prompt
            self.rejected += 1
        raise UserError(f"{MAX_REJECTED:,} generated problems in a row violate {self.rule}")


def check_split(split: str) -> None:
    if split == ALL:
        raise NoSuchSplit(f'only a single file or list has the split "all": use one of {", ".join(SPLITS)}')
    if split not in SPLITS:
        raise UserError(f'unknown split "{split}": use one of {", ".join(SPLITS)}, or all for a single file')


def prompts_of(task: Task, split: str) -> Sequence[Prompt]:
    """Return `task.prompts(split)`; a user's task need not handle the split "all"."""
    if split == ALL and not task.has_all:
        check_split(split)
    return task.prompts(split)


def stable_hash(text: str) -> int:
    """Return a hash that is the same on every machine and in every process, unlike hash()."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def split_of(canonical: str) -> str:
    """Return the split of a generated problem, by its content: a tenth each for test and validation."""
    return {0: "test", 1: "validation"}.get(stable_hash(canonical) % 10, "train")


def rng_for(*key: object) -> random.Random:
    return random.Random(stable_hash("\x1f".join(map(str, key))))


def state_answer(answer: str, extract: str) -> str:
    """Return the shortest text from which `extract` extracts `answer`."""
    check_extractor(extract)
    return ANSWER_FORMS[extract] % answer


def carve_validation(n: int, size: int, seed: int) -> tuple[list[int], list[int]]:
    """Return indices of (train, validation). Validation is the head of a seeded shuffle, in shuffled order.

    So the first few validation problems are a random sample, even if a file is sorted by subject.
    """
    if size < 0 or (size and size >= n):
        raise UserError(
            f"cannot carve {plural(size, 'validation problem')} from {n}: "
            f"set task.args.val_size between 0 and {max(n - 1, 0)}"
        )
    shuffled = seeded_shuffle(n, seed)
    return sorted(shuffled[size:]), shuffled[:size]


def seeded_shuffle(n: int, seed: int | str) -> list[int]:
    shuffled = list(range(n))
    random.Random(seed).shuffle(shuffled)
    return shuffled


def check_gold(task: Task, split: str, judge: Judge | None = None, limit: int | None = None) -> list[str]:
    """Return the ids of problems whose gold completion is not judged correct; there should be none."""
    judge = judge or task.judge()
    prompts = task.prompts(split)
    chosen = prompts if limit is None else prompts[:limit]
    judged = together([judge(task.gold_completion(p), p.answer, judged_fields(judge, p)) for p in chosen])
    return [p.id for p, verdict in zip(chosen, resolve(judged), strict=True) if not is_gold(verdict)]


def is_gold(verdict: Verdict) -> bool:
    return verdict.correct and verdict.reward == 1.0


LIST_LIMIT = 200_000  # prompts that are compared
LAZY_LIMIT = 2_000  # the same for generated prompts
LAZY_S = 2.0  # and the time for generating them: an environment may need long for its first observation
N_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class OverlapReport:
    n_train_checked: int
    n_eval: int  # evaluation prompts checked
    n_shared: int  # of these, the number that are also in train
    examples: tuple[tuple[str, str], ...]  # ids (evaluation, train) of the first few
    sampled: bool  # whether only a sample of either split was checked

    def __str__(self) -> str:
        part = " (a sample of a longer split)" if self.sampled else ""
        shared = f"{self.n_shared} of {self.n_eval} evaluation prompts"
        return f"{shared} are also among {plural(self.n_train_checked, 'train prompt')}{part}"


def overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt], limit: int | None = None) -> OverlapReport:
    """Find evaluation prompts with the text of a train prompt, except for case and whitespace.

    At most `limit` prompts of each split are compared.
    """
    train_checked, eval_checked = _sample(train, limit), _sample(evaluation, limit)
    train_ids: dict[bytes, str] = {}
    for prompt in train_checked:
        train_ids.setdefault(fingerprint(prompt), prompt.id)
    shared = [(prompt.id, train_ids[key]) for prompt in eval_checked if (key := fingerprint(prompt)) in train_ids]
    sampled = len(train_checked) < len(train) or len(eval_checked) < len(evaluation)
    return OverlapReport(len(train_checked), len(eval_checked), len(shared), tuple(shared[:N_EXAMPLES]), sampled)


def fingerprint(prompt: Prompt) -> bytes:
    text = " ".join(message["content"] for message in prompt.messages if message["role"] == "user")
    # Episodes of an environment may start with the same text and differ by their seeds.
    normalised = " ".join([*text.casefold().split(), str(prompt.fields.get("episode_seed", ""))])
    return hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _sample(prompts: Sequence[Prompt], limit: int | None) -> Sequence[Prompt]:
    """Return all prompts, or the first `limit` / 2 (which a run reads first) and a random sample of the rest."""
    if limit is None:
        limit = LAZY_LIMIT if isinstance(prompts, LazyPrompts) else LIST_LIMIT
    if len(prompts) <= limit:
        return prompts
    head = limit // 2
    drawn = random.Random(0).sample(range(head, len(prompts)), limit - head)
    return take_in_time(prompts, (*range(head), *drawn))


def take_in_time(prompts: Sequence[Prompt], indices: Iterable[int]) -> list[Prompt]:
    """The prompts with these indices; of generated ones, the first that take at most `LAZY_S` seconds."""
    deadline = time.monotonic() + LAZY_S if isinstance(prompts, LazyPrompts) else float("inf")
    taken = []
    for index in indices:
        taken.append(prompts[index])
        if time.monotonic() > deadline:
            break
    return taken
