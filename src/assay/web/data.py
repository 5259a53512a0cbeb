"""Answers of the page's requests, as plain dictionaries. No HTTP here: `app` serves them, `report` writes them.

Numbers that are not finite are None. A damaged file never raises: `problems` says what cannot be read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from assay.runs.directory import MAX_DEPTH, changed_settings, is_deeper
from assay.runs.files import Stamp, json_object, stamp_of, to_json
from assay.runs.metrics import X_LABELS, bounds_of, shown_panels
from assay.types import describe_error
from assay.web.findings import Doctor, badge
from assay.web.folder import RunFolder, RunTokenizer, load_tokens
from assay.web.index import (
    ARRAY_ERRORS,
    FOLDERS,
    SKIPPED,
    STATUSES,
    TRAIN,
    IndexedFile,
    Place,
    RunIndex,
    activity,
    cleaned,
    context_spans,
    file_name,
    fold,
    integer,
    place_of,
    problem_of_arrays,
    read_arrays,
    read_file,
    skip_reason,
    token_columns,
    turns_of,
)
from assay.web.table import (
    ALL_EVALUATIONS,
    CHANGES,
    OK,
    OUTCOMES,
    SHOWN,
    CompareQuery,
    Integer,
    Key,
    Names,
    Pairing,
    RolloutsQuery,
    RolloutTable,
    Text,
    TextSearch,
    paired,
)

FACTS = (
    *("path", "state", "error", "started", "task", "model", "algorithm", "seed", "steps", "steps_planned"),
    *("reward", "before", "after", "paired", "wall_s"),
)
MAX_PROBLEMS = 20  # that are listed; the others are counted
FINDINGS_WAIT_S = 0.05  # for findings that are not known yet
READY_WAIT_S = 3.0  # before a diagnosis, for the index: the lists are needed first
RECENT = 20  # training steps whose median time predicts the remaining time
INDEX_WAIT_S = 0.08  # for the index of a small run
TABLE_PAUSE_S = 1.0  # between two tables while a run is indexed
TOKENIZER_WAIT_S = 0.08
MAX_PIECES = 4_000  # tokens of the answers of one request whose texts are sent
KEPT_ARRAYS = 4  # training steps
ANSWER_FIELDS = (
    *("sample", "text", "verdict", "reward", "advantage", "masked", "length", "finish", "truncated", "version"),
    "cut_off",
)
LOADING = "the tokenizer is being loaded"


_threads = ThreadPoolExecutor(2, thread_name_prefix="assay-view")


class ViewError(Exception):
    """A request that cannot be answered: 400 for a bad parameter, 404 for something that does not exist."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


class MetricsQuery(BaseModel):
    """Parameters of a request for curves."""

    names: Names = ()
    x: Text = "step"
    points: Annotated[int, Field(ge=2, le=20_000)] = 1000
    since: Integer | None = None


class RunView:
    """One run, and what was read and computed for it. Safe to use from several threads."""

    def __init__(self, identifier: str, path: Path, request_index: Callable[[RunView], None] | None = None) -> None:
        """`request_index`: asks for `update_index` to be called in another thread; without it, it is called here."""
        self.id = identifier
        self.folder = RunFolder(path)
        self.table = RolloutTable()
        self._request_index = request_index
        self._lock = threading.Lock()
        self._ready = threading.Event()  # set when the table has all rollouts
        self._waited = False
        self._table_files: Any = None  # the files in the table
        self._table_due = 0.0
        self._tokens: Future[tuple[RunTokenizer | None, str | None]] | None = None
        self.doctor = Doctor(self.folder, wait=self._wait_for_index)
        self._quick_doctor = Doctor(self.folder, quick=True)

    @cached_property
    def index(self) -> RunIndex:
        return RunIndex(self.folder)

    @cached_property
    def search(self) -> TextSearch:
        return TextSearch(self.index.store.texts)

    # The index

    def update_index(self, seconds: float = 0.5) -> bool:
        """Read new rollout files for some seconds. Returns whether there are more. For one thread."""
        more = self.index.update(seconds)
        files = self.index.files
        if files is not self._table_files and (not more or time.monotonic() > self._table_due):
            activity.give_way()
            start = time.monotonic()
            table = RolloutTable(list(files.values()))
            now = time.monotonic()
            self.table, self._table_files, self._table_due = table, files, now + max(TABLE_PAUSE_S, 10 * (now - start))
        if not more:
            self._ready.set()
        return more

    def current_table(self) -> RolloutTable:
        """The rollouts that are indexed so far. Waits a moment, so that a small run is indexed completely."""
        if self._request_index is None:
            while self.update_index():
                pass
        else:
            self._request_index(self)
            if not self._waited:
                self._ready.wait(INDEX_WAIT_S)
                self._waited = True
        return self.table

    # Facts and metrics

    def facts(self) -> dict[str, Any]:
        """One entry of the list of runs."""
        facts, problems = self.folder.facts()
        running = facts["state"] == "running"
        doctor = self.doctor if self.doctor.is_current(running) else self._quick_doctor
        examined = doctor.findings(running, 0.0)
        return {
            "id": self.id,
            **shown_facts(facts),
            **pace(self.folder, facts),
            "folder": str(self.folder.path.parent),
            "badge": badge(examined.findings),
            "findings_pending": examined.pending,
            "problems": shortened(problems),
        }

    def detail(self, findings_wait_s: float | None = FINDINGS_WAIT_S) -> dict[str, Any]:
        """`findings_wait_s`: for the doctor; None: until it has finished."""
        self.tokens(0.0)  # begins to load the tokenizer, which is needed soon
        table = self.current_table()
        facts, problems = self.folder.facts()
        examined = self.doctor.findings(facts["state"] == "running", findings_wait_s)
        problems = [*problems, *(problem for problem in (examined.problem, self.index.problem) if problem)]
        problems += [problem for file in table.files for problem in file.problems]
        places = [place for name in self.index.names if (place := place_of(name)) is not None]
        names = sorted(places, key=lambda place: place.order)
        return {
            "id": self.id,
            **shown_facts(facts),
            **pace(self.folder, facts),
            "config": facts["config"],
            "changed": changed_settings(facts["config"] or {}),
            "environment": self.folder.document("environment.json"),
            "summary": self.folder.document("summary.json"),
            "findings": examined.findings,
            "badge": badge(examined.findings),
            "findings_pending": examined.pending,
            "train_steps": [place.step for place in names if place.source == TRAIN],
            "skipped": [self._skipped(place.step) for place in names if place.source == SKIPPED],
            "evals": [self._listed_evaluation(place) for place in names if place.is_evaluation],
            "metrics": sorted(set(self.folder.metrics.columns) - {"step"}),
            "indexed": self.index.progress,
            "problems": shortened(problems),
            "cursor": self.folder.metrics.size,
        }

    def _skipped(self, step: int) -> dict[str, Any]:
        """A batch whose update was skipped, and why."""
        return {
            "step": step,
            "reason": skip_reason(self.folder.document(f"{FOLDERS[SKIPPED]}/step-{step:06d}.json")),
        }

    def _listed_evaluation(self, place: Place) -> dict[str, Any]:
        number = self.table.numbers.get(file_name(place.source, place.step))
        return evaluation_facts(place, None if number is None else self.table.files[number])

    def _wait_for_index(self) -> None:
        if self._request_index is not None:
            self._ready.wait(READY_WAIT_S)

    def metrics(self, query: MetricsQuery) -> dict[str, Any]:
        """Curves. Without names: all that have a panel."""
        x, file = query.x, self.folder.metrics
        if x not in X_LABELS:
            raise ViewError(f"x must be one of {', '.join(X_LABELS)}", 400)
        file.read()
        cursor = file.size
        if query.since == cursor:
            return {"cursor": cursor, "unchanged": True}
        panels = shown_panels(file.points)
        names = query.names or dict.fromkeys(name for panel in panels for name in panel.metrics)
        series = {name: curve(*file.points(name, x), query.points) for name in names if name in file.columns}
        intervals = {
            name: bounds
            for name in series
            if name.endswith("/accuracy") and (bounds := self._intervals(name.removesuffix("/accuracy"), x))
        }
        shown = [{"metric": p.metric, "title": p.title, "share": p.share, "x": p.x} for p in panels]
        return {"cursor": cursor, "series": series, "intervals": intervals, "panels": shown}

    def _intervals(self, name: str, x: str) -> dict[str, list[float]] | None:
        bounds = bounds_of(self.folder.metrics.points, name, x)
        columns = {
            "x": [*bounds],
            "low": [low for low, _ in bounds.values()],
            "high": [high for _, high in bounds.values()],
        }
        return {key: np.array(column).tolist() for key, column in columns.items()} if bounds else None

    # Rollouts

    def rollouts(self, query: RolloutsQuery) -> dict[str, Any]:
        """One page of a list of rollouts, and the number of all by status."""
        table = self.current_table()
        numbers, statuses, searched = self._selected(table, query)
        rows = [table.row(number) for number in numbers[query.offset : query.offset + query.limit].tolist()]
        return {"total": len(numbers), "rows": rows, "statuses": statuses, "searched": searched}

    def _selected(
        self, table: RolloutTable, query: RolloutsQuery
    ) -> tuple[np.ndarray, dict[str, int], dict[str, int] | None]:
        """Numbers of the rows of a list in its order, counts by status, and how far the search is."""
        name = file_name(query.source, 0)
        if query.source not in (TRAIN, SKIPPED, ALL_EVALUATIONS) and name not in table.numbers:
            if name not in self.index.names:
                raise ViewError(f"there is no evaluation {query.source!r}")
            return np.empty(0, np.int64), {}, None  # not indexed yet
        found, searched = None, None
        if query.search:
            found, searched = self.search.find(table, query.search)
        numbers, statuses = table.select(query, found)
        return table.ordered(numbers, query), statuses, searched

    def neighbors(self, place: tuple[str, int, int], query: RolloutsQuery) -> dict[str, Any]:
        """The rollouts before and after the one of a source, step and index in a list, and its position, from 0.

        All are None if it is not in the list.
        """
        table = self.current_table()
        numbers, _, searched = self._selected(table, query)
        found = np.flatnonzero(numbers == table.number_of(*place)).tolist()
        position = found[0] if found else None
        beside = [] if position is None else [position - 1, position + 1]
        places = [table.place_of_row(int(numbers[at])) if 0 <= at < len(numbers) else None for at in beside]
        previous, following = places or (None, None)
        total = len(numbers)
        return {"position": position, "total": total, "previous": previous, "next": following, "searched": searched}

    def rollout(self, source: str, step: int, index: int) -> dict[str, Any]:
        """One rollout with its tokens."""
        file = self._file(source, step)
        (line,) = self.lines(file, [index])
        tokens, tokens_problem, context_texts = self._token_table(file, index, line)
        return {
            **line,
            **self._position(file, index),
            "turns": turns_of(line, context_texts),
            "tokens": tokens,
            "tokens_problem": tokens_problem,
            "tokens_pending": tokens_problem == LOADING,
            "skipped": self._skipped(step)["reason"] if source == SKIPPED else None,
            "problems": file.problems,
        }

    def group(self, source: str, step: int, group: int) -> dict[str, Any]:
        """All answers to one prompt of a step."""
        file = self._file(source, step)
        indices = file.rows["index"][file.rows["group"] == group].tolist()
        if not indices:
            raise ViewError(f"step {step} has no group {group}")
        lines = self.lines(file, indices)
        rollouts = [self.answer(file, index, line) for index, line in zip(indices, lines, strict=True)]
        self.add_pieces([(file, index, line) for index, line in zip(indices, lines, strict=True)], rollouts)
        groups = np.unique(file.rows["group"]).tolist()
        at = groups.index(group)
        shown = ("messages", "answer", "solution", "fields", "task")
        return {
            "source": source,
            "step": step,
            "group": group,
            "prompt": {"id": lines[0].get("prompt_id"), **{name: lines[0].get(name) for name in shown}},
            "rollouts": rollouts,
            "previous": groups[at - 1] if at > 0 else None,
            "next": groups[at + 1] if at + 1 < len(groups) else None,
            "problems": file.problems,
        }

    def answer(self, file: IndexedFile, index: int, line: Mapping[str, Any]) -> dict[str, Any]:
        """A rollout in a list of answers to the same prompt."""
        return {
            **{name: line.get(name) for name in ANSWER_FIELDS},
            **self._position(file, index),
            "turns": turns_of(line, None),
        }

    def _position(self, file: IndexedFile, index: int) -> dict[str, Any]:
        """Where a rollout is, and facts that are not in its line."""
        number = self.table.number_of(file.place.source, file.place.step, index)
        return {
            "source": file.place.source,
            "step": file.place.step,
            "index": index,
            "status": STATUSES[file.rows["status"][file.position(index)]] or None,
            "changed": None if number is None else CHANGES.get(int(self.table.changed[number])),
        }

    def evaluation(self, name: str) -> IndexedFile:
        """The file of an evaluation."""
        return self._named(file_name(name, 0))

    def _file(self, source: str, step: int) -> IndexedFile:
        file = self._named(file_name(source, step))
        if file.place.step != step:
            raise ViewError(f"{source} is an evaluation of step {file.place.step}, not {step}")
        return file

    def _named(self, name: str) -> IndexedFile:
        """A rollout file, which may not be indexed yet."""
        table = self.current_table()
        if name in table.numbers:
            return table.files[table.numbers[name]]
        stamp = stamp_of(self.folder.root / name)
        if place_of(name) is None or stamp is None:
            raise ViewError(f"there is no {name.removesuffix('.jsonl')}")
        return read_file(self.folder, name, repr(stamp))[0]

    def lines(self, file: IndexedFile, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Lines of a rollout file. Numbers that are not finite are None."""
        found = []
        with self.folder.open(file.name) as opened:
            for index in indices:
                position = file.position(index)
                if position is None:
                    raise ViewError(f"{file.name} has no rollout {index}, or its line cannot be read")
                opened.seek(int(file.rows["start"][position]))
                value = json_object(opened.read(int(file.rows["size"][position])))
                if value is None or is_deeper(value, MAX_DEPTH):
                    what = f"line {index + 1} of {file.name} cannot be read, or has changed"
                    raise ViewError(f"{what}: load the page again")
                found.append(cleaned(value))
        return found

    # Tokens

    def tokens(self, wait_s: float = TOKENIZER_WAIT_S) -> tuple[RunTokenizer | None, str | None]:
        """The run's tokenizer, or why there is none. It is loaded in another thread."""
        with self._lock:
            if self._tokens is None:
                self._tokens = _threads.submit(load_tokens, self.folder)
        try:
            tokens, problem = self._tokens.result(wait_s)
        except NotYet:
            return None, LOADING
        if tokens is None:
            self._tokens = None  # a checkpoint may be saved later
        return tokens, problem

    def add_pieces(
        self, lines: Sequence[tuple[IndexedFile, int, Mapping[str, Any]]], answers: Sequence[dict[str, Any]]
    ) -> None:
        """Add the texts of the tokens to answers, as far as they are known quickly; else `pieces` is None."""
        left = MAX_PIECES
        for (file, index, line), answer in zip(lines, answers, strict=True):
            answer["pieces"] = self._pieces(file, index, line) if 0 < integer(line.get("length")) <= left else None
            left -= integer(line.get("length"))

    def _pieces(self, file: IndexedFile, index: int, line: Mapping[str, Any]) -> list[str] | None:
        """The texts of the tokens of an answer. None if they are not known, or are not the text of the answer."""
        texts, _ = self.tokens(0.0)
        text = line.get("text")
        if texts is None or file.place.is_evaluation or len(line["turns"]) > 1 or not isinstance(text, str):
            return None
        try:
            arrays = self._step_arrays(file)
            first, end = arrays["offsets"][index : index + 2].tolist()
            ids = arrays["token_ids"][first + sum(context_end for _, context_end in context_spans(line)) : end].tolist()
            pieces, at = [], 0
            for piece in texts.pieces(ids)[0]:
                if at == len(text):  # what follows ends the answer
                    break
                pieces.append(piece)
                at += len(piece)
        except Exception:  # as in `_token_table`: damaged arrays, or ids of another vocabulary
            return None
        return pieces if "".join(pieces) == text else None

    def _token_table(
        self, file: IndexedFile, index: int, line: Mapping[str, Any]
    ) -> tuple[dict[str, Any] | None, str | None, list[str] | None]:
        """Arrays of the tokens, what is missing, and the texts of the context of each turn."""
        if file.place.is_evaluation:
            return None, "evaluations are saved without tokens", None
        try:
            arrays = self._step_arrays(file)
            table = token_columns(arrays, index, line)
        except ARRAY_ERRORS as error:
            return None, problem_of_arrays(file, error), None
        texts, problem = self.tokens()
        table |= {"text": None, "bytes": {}}
        contexts = None
        if texts is not None:
            try:
                table["text"], table["bytes"] = texts.pieces(table["ids"])
                contexts = [texts.decode(table["ids"][start:end]) for start, end in context_spans(line)]
            except Exception as error:  # ids of another vocabulary make the library raise any exception
                problem = f"the tokenizer of the run does not fit these tokens ({describe_error(error, 100)})"
        return table, problem, contexts

    def _step_arrays(self, file: IndexedFile) -> dict[str, np.ndarray]:
        """The arrays of a training step."""
        stamp = stamp_of((self.folder.root / file.name).with_suffix(".npz"))
        arrays = step_arrays(self.folder, file.name, stamp)
        lines = int(file.rows["index"][-1]) + 1 if len(file.rows) else 0
        if len(arrays["offsets"]) <= lines:
            raise ValueError("the files do not match")
        return arrays


def shown_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": facts["run"], **{key: facts.get(key) for key in FACTS}}


def pace(folder: RunFolder, facts: Mapping[str, Any]) -> dict[str, float | None]:
    """Of a run in progress: seconds that the other steps will take, and sampled tokens per second."""
    steps, planned, budget, answers = (facts[key] for key in ("steps", "steps_planned", "budget", "answers"))
    step_s, tokens_per_s = (recent(folder, f"time/{name}") for name in ("step", "tokens_per_s"))
    if facts["state"] != "running" or not steps or step_s is None:
        return {"eta_s": None, "tokens_per_s": None}
    left = [planned - steps] if planned else []
    left += [(budget - answers) / (answers / steps)] if budget and answers else []
    return {"eta_s": max(min(left), 0) * step_s if left else None, "tokens_per_s": tokens_per_s}


def recent(folder: RunFolder, metric: str) -> float | None:
    """The median of the last values of a metric."""
    _, values = folder.metrics.columns.get(metric, (None, ()))
    return float(np.median(values[-RECENT:])) if len(values) else None


def evaluation_facts(place: Place, file: IndexedFile | None) -> dict[str, Any]:
    """`file`: None if it is not indexed yet."""
    return {
        **{"name": place.source, "step": place.step, "label": place.label, "split": place.split},
        "count": None if file is None else len(file.rows),
        "correct": None if file is None else int((file.rows["status"] == OK).sum()),
    }


def compare(view_a: RunView, view_b: RunView, query: CompareQuery) -> dict[str, Any]:
    """Compare two evaluations, of one run or of two."""
    files = [(view_a, view_a.evaluation(query.a)), (view_b, view_b.evaluation(query.b))]
    pairing = paired(files[0][1], files[1][1])
    if not pairing.keys:
        sides = zip((pairing.a, pairing.b), files, strict=True)
        sizes = " and ".join(f"{len(side.shares)} of {view.id}" for side, (view, _) in sides)
        raise ViewError(
            f"the two evaluations have no question in common ({sizes}): a paired test needs the same task and split",
            400,
        )
    folded = fold(query.search)
    prompts = pairing.a.prompts
    found = [key for key in pairing.keys if not folded or any(folded in fold(text) for text in prompts[key])]
    chosen = [key for change in SHOWN[query.show] for key in found if pairing.changes[key] == change]
    counts = Counter(pairing.changes.values())
    return {
        **{
            side: {"run": view.id, **evaluation_facts(file.place, file)}
            for side, (view, file) in zip("ab", files, strict=True)
        },
        "counts": {change: counts[change] for change in OUTCOMES},
        "p_value": pairing.p_value,
        "unpaired": len(pairing.a.shares) + len(pairing.b.shares) - 2 * len(pairing.keys),
        "total": len(chosen),
        "rows": _rows(pairing, chosen[query.offset : query.offset + query.limit], files),
    }


def _rows(pairing: Pairing, keys: list[Key], files: list[tuple[RunView, IndexedFile]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"prompt_id": pairing.a.prompts[key][0], "change": pairing.changes[key]} for key in keys
    ]
    for side, (view, file), questions in zip("ab", files, (pairing.a, pairing.b), strict=True):
        lines = view.lines(file, [questions.lines[key][0] for key in keys])
        for row, key, line in zip(rows, keys, lines, strict=True):
            verdict = line.get("verdict")
            if side == "a":
                row |= {name: line.get(name) for name in ("messages", "answer")}
            row[side] = {
                **{name: line.get(name) for name in ("text", "reward", "length")},
                **{name: verdict.get(name) if isinstance(verdict, dict) else None for name in ("status", "parsed")},
                "index": questions.lines[key][0],
                "step": file.place.step,
                "source": file.place.source,
                "samples": len(questions.lines[key]),
                "share": questions.shares[key],
            }
    return rows


@lru_cache(KEPT_ARRAYS)
def step_arrays(folder: RunFolder, name: str, stamp: Stamp | None) -> dict[str, np.ndarray]:
    """The arrays of a training step. The latest are kept; `stamp` changes with their file."""
    return read_arrays(folder, name)


def curve(xs: np.ndarray, ys: np.ndarray, limit: int) -> dict[str, list[float]]:
    """At most `limit` points: of each bin the minimum and the maximum, so that no peak is lost."""
    if len(xs) > limit:
        edges = np.linspace(0, len(xs), max(limit // 2, 1) + 1).astype(int)
        bins = [(start, end) for start, end in pairwise(edges.tolist()) if end > start]
        ends = {place for a, b in bins for place in (a + int(ys[a:b].argmin()), a + int(ys[a:b].argmax()))}
        kept = np.array(sorted(ends))
        xs, ys = xs[kept], ys[kept]
    return {"x": xs.tolist(), "y": ys.tolist()}


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and the number of the others."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"and {more} more problems"] if more > 0 else [])]


def plain(value: Any) -> Any:
    """The value as JSON can express it: numbers that are not finite are None."""
    return to_json(value, non_finite=lambda number: None)
