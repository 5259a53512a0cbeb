"""All indexed rollouts of a run as arrays: filters, order, search, and pass rates of prompts over time; and the
comparison of two evaluations.

A `RolloutTable` does not change; a new one replaces it when the index has changed.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from assay.evals import difference_interval, paired_test
from assay.web.index import END, FINISHES, ROW, SKIPPED, STATUSES, TRAIN, IndexedFile, Place, activity, file_name, fold

OK = STATUSES.index("ok")
ALL_EVALUATIONS = "eval"  # as a source
GAINED, LOST = 1, -1
_RANK = {TRAIN: 0, SKIPPED: 1, ALL_EVALUATIONS: 2}  # order of the files
CHANGES = {GAINED: "gained", LOST: "lost"}
SEARCH_S = 0.11  # for one search; the next request with the same text continues it
CACHED_SEARCHES = 16
CACHED_TEXT = 512 * 2**20  # bytes of texts that are kept in memory
PARTS = 60  # of a training, in which solved prompts are counted
QUESTION = 200  # characters that are shown in lists
MAX_PARAMETER = 2000  # characters
MAX_LIMIT = 500  # rows of one answer
Text = Annotated[str, StringConstraints(max_length=MAX_PARAMETER, pattern=r"^[^\x00]*$")]
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def split_names(names: Any) -> Any:
    return [name for name in names.split(",") if name] if isinstance(names, str) else names


Names = Annotated[tuple[Text, ...], BeforeValidator(split_names)]


Order = Literal["asc", "desc"]


class Page(BaseModel):
    """Parameters of a list. Those that a request does not know are ignored; empty ones do not restrict."""

    model_config = ConfigDict(populate_by_name=True, frozen=True)

    offset: Annotated[int, Field(ge=0, le=2**53)] = 0
    limit: Annotated[int, Field(ge=0, le=MAX_LIMIT)] = 50
    search: Text = ""


class PromptsQuery(Page):
    source: Literal["train", "eval"] = "train"
    sort: Literal["id", "pass_rate", "change", "seen"] = "pass_rate"
    order: Order = "asc"


class RolloutsQuery(Page):
    """Which rollouts are listed, and in which order."""

    sort: Literal["step", "reward", "length", "advantage"] = "step"
    order: Order = "desc"
    source: Text = TRAIN
    first_step: Annotated[Integer | None, Field(alias="from")] = None
    last_step: Annotated[Integer | None, Field(alias="to")] = None
    prompt: Text | None = None
    statuses: Annotated[Names, Field(alias="status")] = ()
    min_reward: Number | None = None
    max_reward: Number | None = None
    min_length: Number | None = None
    max_length: Number | None = None
    truncated: bool | None = None
    changed: Literal["", "gained", "lost", "any"] = ""


class RolloutTable:
    def __init__(self, files: Sequence[IndexedFile] = ()) -> None:
        self.files = sorted(files, key=lambda file: file.place.order)
        counts = [len(file.rows) for file in self.files]
        self.first = np.cumsum([0, *counts])  # of each file, and the number of all rows
        self.rows = np.concatenate([file.rows for file in self.files]) if self.files else np.empty(0, ROW)
        self.file = np.repeat(np.arange(len(self.files)), counts)  # of each row
        self.step = np.repeat(np.array([file.place.step for file in self.files], np.int64), counts)
        self.numbers = {file.name: number for number, file in enumerate(self.files)}
        self._number_prompts()
        self._compare_with_previous(counts)

    def _number_prompts(self) -> None:
        """Number the prompts of all files; those with the same id are the same."""
        numbers: dict[str, int] = {}
        self.questions: list[str] = []
        parts = []
        for file in self.files:
            file_numbers = np.empty(max(len(file.prompts), 1), np.int64)
            for place, (identifier, question) in enumerate(file.prompts):
                number = numbers.setdefault(identifier, len(numbers))
                if number == len(self.questions):
                    self.questions.append(question)
                file_numbers[place] = number
            parts.append(file_numbers[file.rows["prompt"]])
        self.prompt_numbers = numbers
        self.prompt_ids = list(numbers)
        self.prompt = np.concatenate(parts) if parts else np.empty(0, np.int64)
        pairs = zip(self.prompt_ids, self.questions, strict=True)
        self._folded_prompts = [fold(identifier) + END + fold(question) for identifier, question in pairs]
        self.prompt_rank = np.empty(len(numbers), np.int64)  # position of each prompt in the order of ids
        order = sorted(range(len(numbers)), key=lambda number: id_order(self.prompt_ids[number]))
        self.prompt_rank[order] = np.arange(len(numbers))

    def _compare_with_previous(self, counts: Sequence[int]) -> None:
        """Group answers by prompt and time, and compare each with the majority at the previous time.

        Training is one series; skipped batches, and evaluations of the same split, are others.
        """
        splits = sorted({file.place.split for file in self.files if file.place.is_evaluation})
        series = [self._series(file.place, splits) for file in self.files]
        times = np.arange(len(self.files))  # files are in the order of time
        rows_series = np.repeat(np.array(series, np.int64), counts)
        rows_time = np.repeat(times, counts)
        self.correct = self.rows["status"] == OK
        order = np.lexsort((rows_time, self.prompt, rows_series))
        keys = [part[order] for part in (rows_series, self.prompt, rows_time)]
        differs = [np.concatenate([[True], part[1:] != part[:-1]])[: len(part)] for part in keys]
        begins = differs[0] | differs[1] | differs[2]
        group = np.cumsum(begins) - 1
        count = np.bincount(group) if len(group) else np.zeros(0, int)
        correct = np.bincount(group, self.correct[order]).astype(int) if len(group) else np.zeros(0, int)
        self.rate_series, self.rate_prompt, self.rate_time = (part[begins] for part in keys)
        self.rate_count, self.rate_correct = count, correct
        share = correct / np.maximum(count, 1)
        continues = ~(differs[0] | differs[1])[begins]  # the previous group is an earlier time of the same prompt
        previous = np.where(continues, np.concatenate([[np.nan], share[:-1]])[: len(share)], np.nan)
        before = previous[group]
        changed = np.zeros(len(order), np.int8)
        changed[order] = np.where(
            self.correct[order] & (before < 0.5), GAINED, np.where(~self.correct[order] & (before > 0.5), LOST, 0)
        )
        self.changed = changed
        self.rate = np.empty(len(order), np.int64)  # of each row: the position of its prompt and time in the rates
        self.rate[order] = group

    @staticmethod
    def _series(place: Place, splits: Sequence[str]) -> int:
        """0 for training, -1 for skipped batches, else the number of the split."""
        if place.is_evaluation:
            return 1 + splits.index(place.split)
        return 0 if place.source == TRAIN else -1

    # Lists of rollouts

    def file_rows(self, source: str) -> slice:
        """The rows of training, of skipped batches, of all evaluations, or of one of them."""
        kinds = [ALL_EVALUATIONS if file.place.is_evaluation else file.place.source for file in self.files]
        if source in (TRAIN, SKIPPED, ALL_EVALUATIONS):  # their files follow each other
            begin = bisect_left(kinds, _RANK[source], key=_RANK.__getitem__)
            end = bisect_right(kinds, _RANK[source], key=_RANK.__getitem__)
        else:
            begin = self.numbers[file_name(source, 0)]
            end = begin + 1
        return slice(int(self.first[begin]), int(self.first[end]))

    def number_of(self, source: str, step: int, index: int) -> int | None:
        """The number of a row; None if there is none."""
        file = self.numbers.get(file_name(source, step))
        if file is None or self.files[file].place.step != step:
            return None
        position = self.files[file].position(index)
        return None if position is None else int(self.first[file]) + position

    def place_of_row(self, number: int) -> dict[str, Any]:
        place = self.files[self.file[number]].place
        return {"source": place.source, "step": place.step, "index": int(self.rows["index"][number])}

    def select(self, wanted: RolloutsQuery, found: np.ndarray | None) -> tuple[np.ndarray, dict[str, int]]:
        """Numbers of the rows that pass the filter, and counts by status of those that pass all else.

        `found`: whether each row has the searched text.
        """
        part = self.file_rows(wanted.source)
        rows, step = self.rows[part], self.step[part]
        keep = np.ones(len(rows), bool)
        for values, low, high in (
            (rows["reward"], wanted.min_reward, wanted.max_reward),
            (rows["length"], wanted.min_length, wanted.max_length),
            (step, wanted.first_step, wanted.last_step),
        ):
            keep &= values >= low if low is not None else True
            keep &= values <= high if high is not None else True
        if wanted.truncated is not None:
            keep &= rows["truncated"] == wanted.truncated
        if wanted.prompt is not None:
            keep &= self.prompt[part] == self.prompt_numbers.get(wanted.prompt, -1)
        if wanted.changed:
            codes = [code for code, name in CHANGES.items() if wanted.changed in (name, "any")]
            keep &= np.isin(self.changed[part], codes)
        if found is not None:
            keep &= found[part]
        counts = np.bincount(rows["status"][keep], minlength=len(STATUSES))
        statuses = {STATUSES[code] or "none": int(number) for code, number in enumerate(counts) if number}
        if wanted.statuses:
            codes = [code for code, name in enumerate(STATUSES) if (name or "none") in wanted.statuses]
            keep &= np.isin(rows["status"], codes)
        return np.flatnonzero(keep) + part.start, statuses

    def ordered(self, numbers: np.ndarray, query: RolloutsQuery) -> np.ndarray:
        """The row numbers in the wanted order; rows without a value come last, equal ones by step."""
        if query.sort == "step":
            if query.order == "asc":
                return numbers
            # The newest step or evaluation first, and its answers in their own order.
            return numbers[np.argsort(-self.file[numbers], kind="stable")]
        values = self.rows[query.sort][numbers].astype(float)
        return numbers[np.argsort(values if query.order == "asc" else -values, kind="stable")]

    def row(self, number: int) -> dict[str, Any]:
        row, file = self.rows[number], self.file[number]
        prompt, rate = int(self.prompt[number]), self.rate[number]
        return {
            **self.place_of_row(number),
            **{name: row[name].item() for name in ("group", "sample", "length", "truncated", "version", "turns")},
            "prompt_id": self.prompt_ids[prompt],
            "prompt_preview": self.questions[prompt][:QUESTION],
            "preview": self.files[file].previews[number - self.first[file]],
            "status": STATUSES[row["status"]] or None,
            "reward": _number(row["reward"]),
            "advantage": _number(row["advantage"]),
            "finish": FINISHES[row["finish"]] or None,
            "changed": CHANGES.get(int(self.changed[number])),
            "passed": [int(self.rate_correct[rate]), int(self.rate_count[rate])],  # answers to the prompt at this time
        }

    # Prompts

    def prompts(self, query: PromptsQuery) -> dict[str, Any]:
        """Pass rates of prompts over time, in training or in evaluations."""
        chosen = np.flatnonzero(self.rate_series > 0 if query.source == "eval" else self.rate_series == 0)
        prompt, count = self.rate_prompt[chosen], self.rate_count[chosen]
        correct = self.rate_correct[chosen]
        order = np.argsort(prompt, kind="stable")
        chosen, prompt, count, correct = chosen[order], prompt[order], count[order], correct[order]
        if not len(chosen):
            return {"total": 0, "rows": [], "solved": {}}
        solved = self._solved(chosen)
        numbers, first = np.unique(prompt, return_index=True)
        ends = np.append(first[1:], len(prompt)).astype(int)
        seen = np.add.reduceat(count, first)
        passed = np.add.reduceat(correct, first) / np.maximum(seen, 1)
        share = correct / np.maximum(count, 1)
        change = share[ends - 1] - share[first]
        keep = np.arange(len(numbers))
        if query.search:
            keep = np.flatnonzero(np.isin(numbers, self.matching_prompts(fold(query.search))))
        columns = {"id": self.prompt_rank[numbers], "pass_rate": passed, "change": change, "seen": seen}
        keys = columns[query.sort][keep]
        keep = keep[np.lexsort((self.prompt_rank[numbers[keep]], keys if query.order == "asc" else -keys))]
        rows = [
            {
                "prompt_id": self.prompt_ids[numbers[at]],
                "preview": self.questions[numbers[at]][:QUESTION],
                "seen": int(seen[at]),
                "pass_rate": float(passed[at]),
                "first_rate": float(share[first[at]]),
                "last_rate": float(share[ends[at] - 1]),
                "rates": [
                    [self.files[self.rate_time[chosen[k]]].place.step, int(correct[k]), int(count[k])]
                    for k in range(first[at], ends[at])
                ],
            }
            for at in keep[query.offset : query.offset + query.limit].tolist()
        ]
        return {"total": len(keep), "rows": rows, "solved": solved}

    def _solved(self, chosen: np.ndarray) -> dict[str, list[int]]:
        """By step, or by part of the training: how many prompts all, some or none of their answers solved."""
        steps = np.array([file.place.step for file in self.files], np.int64)[self.rate_time[chosen]]
        known, at = np.unique(steps, return_inverse=True)
        parts = min(PARTS, len(known))
        part = np.arange(len(known)) * parts // len(known)  # of each step
        begins = np.searchsorted(part, np.arange(parts))
        correct, count = self.rate_correct[chosen], self.rate_count[chosen]
        kinds = {"always": correct == count, "sometimes": (correct > 0) & (correct < count), "never": correct == 0}
        numbers = {kind: np.bincount(part[at], which, parts).astype(int).tolist() for kind, which in kinds.items()}
        ends = np.append(begins[1:], len(known)) - 1
        return {"first": known[begins].tolist(), "last": known[ends].tolist(), **numbers}

    def matching_prompts(self, folded: bytes) -> np.ndarray:
        """Numbers of the prompts with this text in their id or question."""
        return np.array([n for n, text in enumerate(self._folded_prompts) if folded in text], np.int64)


def id_order(identifier: str) -> list[tuple[int, int, str]]:
    """A key to sort ids, in which numbers count as numbers."""
    parts = re.split(r"(\d{1,15})", identifier)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


class TextSearch:
    """Searches the texts of answers, for a limited time per request. Results are kept, and continued later."""

    def __init__(self, texts: Callable[[IndexedFile], bytes]) -> None:
        """`texts(file)`: the texts of a file."""
        self._read = texts
        self._lock = threading.Lock()
        self._cached: OrderedDict[IndexedFile, tuple[bytes, list[int]]] = OrderedDict()
        self._cached_bytes = 0
        # By text: the rows that were found in each file.
        self._results = lru_cache(CACHED_SEARCHES)(lambda folded: dict[IndexedFile, np.ndarray]())

    def find(self, table: RolloutTable, text: str, seconds: float = SEARCH_S) -> tuple[np.ndarray, dict[str, int]]:
        """Whether each row has the text, in its answer or question; and how many files were searched so far."""
        folded = fold(text)
        deadline = time.monotonic() + activity.share(seconds)
        found = np.isin(table.prompt, table.matching_prompts(folded))
        results = self._results(folded)
        done = fresh = 0
        for number in reversed(range(len(table.files))):  # the newest steps first
            file = table.files[number]
            hits = results.get(file)
            if hits is None:
                if fresh and time.monotonic() > deadline:
                    continue
                fresh += 1
                hits = results[file] = self._search(file, folded)
            done += 1
            found[table.first[number] + hits] = True
        return found, {"done": done, "total": len(table.files)}

    def _search(self, file: IndexedFile, folded: bytes) -> np.ndarray:
        """Rows of a file that have the text."""
        texts, ends = self._texts(file)
        hits = []
        at = texts.find(folded)
        while at >= 0:
            row = bisect_right(ends, at)
            hits.append(row)
            at = texts.find(folded, ends[row])
        return np.array(hits, np.int64)

    def _texts(self, file: IndexedFile) -> tuple[bytes, list[int]]:
        with self._lock:
            if file in self._cached:
                self._cached.move_to_end(file)
                return self._cached[file]
        texts, ends = self._read(file), file.rows["text_end"].tolist()
        if not ends or len(texts) != ends[-1]:
            return b"", ends  # deleted in the meantime
        with self._lock:
            if file not in self._cached:
                self._cached[file] = texts, ends
                self._cached_bytes += len(texts)
            while self._cached_bytes > CACHED_TEXT and len(self._cached) > 1:
                self._cached_bytes -= len(self._cached.popitem(last=False)[1][0])
        return texts, ends


# Two evaluations question by question: which were gained, which were lost, and a paired test. Two questions are the
# same if their ids, texts and gold answers are the same: generated problems can have the same id and differ. System
# messages are not compared, because they are part of what may differ between runs.

OUTCOMES = ("gained", "lost", "same_correct", "same_wrong")
SHOWN = {"changed": OUTCOMES[:2], "gained": OUTCOMES[:1], "lost": OUTCOMES[1:2], "all": OUTCOMES}
Key = tuple[int, int]  # hash of the question, and a number if several questions are equal
KEPT_COMPARISONS = 16


class Questions:
    """The questions of an evaluation: share of correct answers, and the lines of the answers."""

    def __init__(self, file: IndexedFile) -> None:
        rows = {name: file.rows[name].tolist() for name in ("group", "index", "prompt", "question", "status")}
        groups: dict[int, list[int]] = {}
        for position, group in enumerate(rows["group"]):
            if group >= 0:  # else the line is damaged
                groups.setdefault(group, []).append(position)
        seen: Counter[int] = Counter()
        self.shares: dict[Key, float] = {}
        self.lines: dict[Key, list[int]] = {}
        self.prompts: dict[Key, tuple[str, str]] = {}
        for positions in groups.values():
            question = rows["question"][positions[0]]
            key = question, seen[question]
            seen[question] += 1
            self.shares[key] = sum(rows["status"][position] == OK for position in positions) / len(positions)
            self.lines[key] = [rows["index"][position] for position in positions]
            self.prompts[key] = file.prompts[rows["prompt"][positions[0]]]


class Pairing:
    """The common questions of two evaluations, in the order of the first.

    Without common questions, all questions of A are compared with all of B: `p_value` is None, and nothing is gained or
    lost.
    """

    def __init__(self, a: Questions, b: Questions) -> None:
        self.a, self.b = a, b
        self.keys = [key for key in a.shares if key in b.shares]
        self.changes = {key: change_of(a.shares[key], b.shares[key]) for key in self.keys}
        self.shares = [np.array([side.shares[key] for key in self.keys or side.shares]) for side in (a, b)]
        self.p_value = paired_test(self.shares[0], self.shares[1], seed=0).p_value if self.keys else None

    def facts(self) -> dict[str, Any]:
        """Accuracies on the compared questions, their difference, and the ids of questions gained and lost."""
        was, now = self.shares
        common = len(self.keys)
        return {
            "paired": common > 0,
            "questions": common,
            "only_a": len(self.a.shares) - common,
            "only_b": len(self.b.shares) - common,
            "accuracy_a": float(was.mean()),
            "accuracy_b": float(now.mean()),
            "difference": float(now.mean()) - float(was.mean()),
            "ci95": difference_interval(was, now, paired=common > 0),
            "p_value": self.p_value,
            "gained": self._changed("gained"),
            "lost": self._changed("lost"),
        }

    def _changed(self, change: str) -> list[str]:
        return [self.a.prompts[key][0] for key in self.keys if self.changes[key] == change]


def change_of(before: float, after: float) -> str:
    if abs(after - before) > 1e-9:
        return "gained" if after > before else "lost"
    return "same_correct" if after >= 0.5 else "same_wrong"


@lru_cache(KEPT_COMPARISONS)
def paired(a: IndexedFile, b: IndexedFile) -> Pairing:
    """The comparison of two evaluations. If a file changes, it gets a new `IndexedFile`."""
    return Pairing(Questions(a), Questions(b))


class CompareQuery(Page):
    """Two evaluations by the ids of their runs and their names, and which questions are listed."""

    run_a: Text
    a: Text
    run_b: Text
    b: Text
    show: Literal["changed", "gained", "lost", "all"] = "changed"
