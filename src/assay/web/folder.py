"""Reading of a run folder that may be damaged, half-written, in progress, or made by somebody else.

Nothing here raises because of the content of a file. What cannot be read is described in `problems`. Files that lead
out of the folder by a symbolic link are refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from assay.checks.causes import FIRST
from assay.runs.directory import FOLDERS, Refused, RunFiles, access_problem, is_locked, reason_of, setting, state_of
from assay.runs.files import Stamp, as_stamp, from_json, json_lines, stamp_of
from assay.runs.resolve import PREFIX, split_tag
from assay.text.tokenizer import REPLACEMENT, Detokenizer
from assay.types import UserError, describe_error, hide_credentials, unknown_name

MARKS = ("config.toml", "metrics.jsonl", "environment.json", "rollouts", "evals")  # of a run folder, complete or not
MAX_LINE = 16 * 2**20  # bytes of a line of metrics
MAX_VALUES = 2_000_000  # of metrics that are kept for curves
MAX_DAMAGED = 1000  # lines of metrics that are listed as problems
BATCH = 2_000  # rows that are read before they are moved to the columns
NUMBERS = {int, float}  # types of the values of metrics
DIAGNOSED = 10_000  # last training steps that the doctor examines, besides the first ones
LARGEST = 2**53  # integers beyond it have no exact float, neither here nor in JavaScript
INCOMPLETE = "metrics.jsonl ends with an incomplete line"  # of a run that was killed, or is being copied


def is_run_folder(path: Path) -> bool:
    return os.path.isdir(path) and any(os.path.exists(path / mark) for mark in MARKS)


def find_folder(name: str, runs_dir: Path, or_runs: bool = False) -> Path:
    """The folder of a run, also of a damaged one. `or_runs`: or a folder with runs."""
    name = split_tag(name)[0].removeprefix(PREFIX) if name.startswith(PREFIX) else name
    candidates = [Path(name).expanduser(), runs_dir / name]
    # An unrelated folder here may have the same name as a run.
    found = [*filter(is_run_folder, reversed(candidates)), *(filter(os.path.isdir, candidates) if or_runs else ())]
    if found:
        return found[0]
    if problem := next(filter(None, map(access_problem, (*candidates, runs_dir))), None):
        raise UserError(problem)
    known = [path.name for path in sorted(runs_dir.iterdir()) if is_run_folder(path)] if os.path.isdir(runs_dir) else []
    what = "run or folder" if or_runs else "run"
    if not known:
        raise UserError(f"there is no {what} {name}, and {runs_dir} has no runs: give the path of a run, or --runs_dir")
    raise unknown_name(what, name, known, listed=known[-5:])


def finite_number(value: Any) -> float | None:
    """The value as a number, if it is a finite one; also of "NaN" and the like, which stand for numbers in files."""
    value = from_json(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < math.inf:
        return None
    return value if isinstance(value, float) or abs(value) <= LARGEST else None


class RunFolder(RunFiles):
    """The files of one run, without credentials. What has not changed is not read again. Safe to use from several
    threads.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.root = path.resolve()
        self.metrics = MetricsFile(self)
        self._documents: dict[str, tuple[Stamp | None, dict[str, Any]]] = {}

    @property
    def name(self) -> str:
        return self.root.name

    def place(self, name: str) -> Path:
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root):
            raise Refused(f"{name} is a link that leads out of the run folder")
        return path

    def text(self, name: str) -> str:
        return hide_credentials(super().text(name))

    def _parsed(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        stamp, known = stamp_of(self.root / name), self._documents.get(name)
        if known is None or known[0] != stamp:
            known = self._documents[name] = stamp, super()._parsed(name, parse)
        return known[1]

    def facts(self) -> tuple[dict[str, Any], list[str]]:
        """What is known about the run, and which files cannot be read. Values of unexpected types are None."""
        names = ("summary.json", "status.json", "environment.json")
        summary, status, environment = map(self.document, names)
        config, problems = self.config(), list(self.metrics.read())
        state = state_of(is_locked(self.root), status, summary)
        if self.metrics.incomplete and state != "running":
            problems.append(INCOMPLETE)
        known = (self._problems.get(name) for name in ("config.toml", *names, *FOLDERS))
        problems = [*filter(None, known), *problems]
        if not (self.root / "config.toml").exists():
            problems.insert(0, "config.toml is missing")
        facts: dict[str, Any] = {"run": self.name, "path": str(self.path), "state": state, "config": config}
        facts["error"] = as_text(status.get("error")) if state == "failed" else None
        return facts | facts_of(config, self.metrics.last, summary, status, environment), problems


def facts_of(
    config: Mapping[str, Any],
    last: Mapping[str, float],
    summary: Mapping[str, Any],
    status: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """Facts of a run from its files. `last`: the last value of each metric."""
    # The number of steps of a run that has not begun is not known if it depends on the data.
    counted = not (setting(config, "train.epochs") or setting(config, "train.budget"))
    planned = setting(config, "train.steps") if counted else None
    before, paired = summary.get("before"), summary.get("paired")
    if not summary and "before/accuracy" in last:
        interval = [last.get("before/low"), last.get("before/high")]
        before = {"accuracy": last["before/accuracy"], "ci95": interval}
    values = {
        "seed": summary.get("seed", setting(config, "seed")),
        "steps": last.get("step", summary.get("steps", 0)),
        "steps_planned": status.get("total_steps", planned),
        "answers": last.get("sampling/answers"),
        "budget": setting(config, "train.budget") or None,
        "reward": last.get("reward/mean"),
        "wall_s": summary.get("wall_s", last.get("time/wall")),
        "tokens": summary.get("tokens"),
    }
    return {
        "started": as_text(environment.get("started")),
        "task": as_text(summary.get("task") or setting(config, "task.name")),
        "model": as_text(summary.get("model") or setting(config, "model.source")),
        "algorithm": as_text(summary.get("algorithm") or setting(config, "algo.recipe")),
        **numbers(values),
        "warm_start": numbers({"step": last.get("sft/step"), "steps": setting(config, "sft.steps")}),
        "before": evaluation(before),
        "after": evaluation(summary.get("after")),
        "paired": {**paired, **numbers(paired, "p_value", "gained", "lost")} if isinstance(paired, Mapping) else None,
    }


def as_text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) else None


def evaluation(measured: Any) -> dict[str, Any] | None:
    """The entry of an evaluation, if it has an accuracy; an interval that is none is None."""
    if not isinstance(measured, Mapping) or finite_number(measured.get("accuracy")) is None:
        return None
    return {**measured, "ci95": measured.get("ci95") if is_interval(measured.get("ci95")) else None}


def numbers(values: Mapping[str, Any], *names: str) -> dict[str, float | None]:
    """The values with these names, or all of them, as far as they are numbers."""
    return {name: finite_number(values.get(name)) for name in names or values}


def is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and None not in map(finite_number, value)


class MetricsFile:
    """metrics.jsonl, of which only new lines are read. `columns` has the finite values of each metric.

    Memory is limited. Of a long run, `columns` has some rows only. They include the first, last, smallest and largest
    value of every metric in each of many parts of the run.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.stamp: Stamp | None = None
        self.size = 0  # of the lines that were read
        self.incomplete = False  # whether the last line has no end
        self.columns: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # row numbers and values
        self.last: dict[str, float] = {}  # the last value of each metric; of "step", the largest
        self.problems: list[str] = []
        self._steps: list[dict[str, Any]] = []  # the first and the last training steps
        self._lines = self._rows = 0
        self._new: dict[str, list[tuple[int, float]]] = {}  # by metric: row numbers and values
        self._max_values = MAX_VALUES
        self._tail = b""  # the last bytes that were read
        self._points: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}

    def read(self) -> list[str]:
        """Read new lines; returns the problems of those that cannot be read."""
        with self._lock:
            self._update()
            return self.problems

    def steps(self) -> list[dict[str, Any]]:
        """The training steps that the doctor needs: of a long run, the first and the last."""
        with self._lock:
            return [{name: from_json(value) for name, value in row.items()} for row in self._steps]

    def points(self, metric: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """Positions along the metric `x` and values; for several values at a position, the last one."""
        with self._lock:
            key = metric, x
            if key not in self._points:
                self._points[key] = self._along(metric, x)
            return self._points[key]

    def _along(self, metric: str, x: str) -> tuple[np.ndarray, np.ndarray]:
        rows, values = map(np.array, self.columns.get(metric, ((), ())))
        positions, at = map(np.array, self.columns.get(x, ((), ())))
        if not len(rows) or not len(positions):
            return np.empty(0), np.empty(0)
        place = np.searchsorted(positions, rows)
        shared = (place < len(positions)) & (positions[np.minimum(place, len(positions) - 1)] == rows)
        xs, ys = at[place[shared]], values[shared]
        xs, first = np.unique(xs[::-1], return_index=True)  # the first of the reversed values is the last one
        return as_integers(xs), as_integers(ys[::-1][first])

    def _update(self) -> None:
        try:
            with self._folder.open("metrics.jsonl") as file:
                stamp = as_stamp(os.fstat(file.fileno()))
                if stamp == self.stamp:
                    return
                if self.stamp is None or stamp[-1] != self.stamp[-1] or not self._continues(file):
                    self._clear()
                file.seek(self.size)
                self._read_lines(file)
                self.stamp = stamp
        except FileNotFoundError:
            self._clear()
        except OSError as error:
            self._clear()
            self.problems = [reason_of("metrics.jsonl", error)]

    def _continues(self, file: IO[bytes]) -> bool:
        """Whether the lines that were read are still there. A resumed run replaces the file by a shorter one."""
        file.seek(self.size - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _read_lines(self, file: IO[bytes]) -> None:
        self._points = {}
        self.problems = list(self.problems)  # others may still use the old ones
        self.incomplete = False
        for line in json_lines(file, MAX_LINE, _DECODE):
            if not line.is_complete:
                self.incomplete = True
                break
            self.size += line.size
            self._tail = line.content[-256:]
            self._lines += 1
            if line.size > len(line.content):
                self._add_problem(f"longer than {MAX_LINE >> 20} MiB")
            elif line.value is None or type(line.value.get("step")) is not int:
                self._add_problem("not a line of metrics")
            else:
                self._add(line.value)
        self._extend_columns()

    def _add_problem(self, problem: str) -> None:
        if len(self.problems) < MAX_DAMAGED:
            self.problems.append(f"metrics.jsonl, line {self._lines}: {problem}")
        elif len(self.problems) == MAX_DAMAGED:
            self.problems.append("metrics.jsonl: more lines cannot be read")

    def _add(self, row: dict[str, Any]) -> None:
        if "reward/mean" in row:
            self._steps.append(row)
        for name, value in row.items():
            if type(value) in NUMBERS and abs(value) < math.inf:
                self._new.setdefault(name, []).append((self._rows, value))
        self._rows += 1
        if self._rows % BATCH == 0:
            self._extend_columns()

    def _extend_columns(self) -> None:
        """Move new rows to the columns, and drop what is not needed of earlier ones."""
        for name, pairs in self._new.items():
            numbers, values = np.array(pairs, dtype=float).T
            before = self.columns.get(name, (np.empty(0), np.empty(0)))
            self.columns[name] = np.append(before[0], numbers), np.append(before[1], values)
            self.last[name] = float(values[-1])
        if "step" in self._new:
            self.last["step"] = int(self.columns["step"][1].max())
        self._new = {}
        del self._steps[FIRST:-DIAGNOSED]
        if sum(len(numbers) for numbers, _ in self.columns.values()) > self._max_values:
            self._thin()

    def _thin(self) -> None:
        """Reduce the columns to about half of `MAX_VALUES`."""
        total = sum(len(numbers) for numbers, _ in self.columns.values())
        rows = MAX_VALUES // 2 * len(self.columns["step"][0]) // total
        edges = np.linspace(0, self._rows, max(rows // (4 * len(self.columns)), 1), endpoint=False)
        kept = np.unique(np.concatenate([column[0][_extremes(*column, edges)] for column in self.columns.values()]))
        for name, (numbers, values) in self.columns.items():
            shown = np.isin(numbers, kept, assume_unique=True)
            self.columns[name] = numbers[shown], values[shown]
        left = sum(len(numbers) for numbers, _ in self.columns.values())
        self._max_values = max(MAX_VALUES, 2 * left)  # more if there are very many metrics


def _extremes(numbers: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Positions of the first, last, smallest and largest value of each part. `edges`: where parts begin."""
    starts = np.unique(np.searchsorted(numbers, edges))
    starts = starts[starts < len(numbers)]
    ends = np.append(starts[1:], len(numbers)) - 1
    parts = np.repeat(np.arange(len(starts)), ends - starts + 1)
    order = np.lexsort((values, parts))  # by part, then by value
    return np.concatenate([starts, ends, order[starts], order[ends]])


def _exact_integer(text: str) -> int | None:
    """An integer of a JSON text. None if it has no exact float: it would fail in every computation."""
    value = int(text) if len(text) < 20 else LARGEST + 1
    return value if abs(value) <= LARGEST else None


_DECODE = partial(json.loads, parse_int=_exact_integer)


def as_integers(values: np.ndarray) -> np.ndarray:
    """The values as integers, if all of them are."""
    exact = bool((np.abs(values) <= LARGEST).all() and (values == np.trunc(values)).all())
    return values.astype(np.int64) if exact else values


# The tokenizer of a run, from files of the run, or from the model that its config names, if that is on this machine.
# There are no downloads, and no code of models is run.

FILE = "tokenizer.json"
MAX_TOKENIZER = 256 * 2**20  # bytes of a tokenizer.json
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class RunTokenizer:
    """A tokenizer of the tokenizers package, for decoding only."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        decoder = getattr(backend, "decoder", None)
        state = decoder.__getstate__() if decoder is not None else b""
        self._byte_level = b"ByteLevel" in (state if isinstance(state, bytes) else b"")

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> tuple[list[str], dict[int, str]]:
        """The text of each token: joined, they are the decoded text. And bytes, in hexadecimal, by position.

        Of a character that takes several tokens, the last token has the text. Tokens of such characters, and
        tokens that are not valid UTF-8, have their bytes in the second result.
        """
        detokenizer = Detokenizer(self.decode)
        texts = [detokenizer.add([index]) for index in ids]
        if texts:
            texts[-1] += detokenizer.finish()
        return texts, self._bytes_of(ids, texts)

    def _bytes_of(self, ids: Sequence[int], texts: Sequence[str]) -> dict[int, str]:
        found: dict[int, str] = {}
        for place, text in enumerate(texts):
            is_part = not text or REPLACEMENT in text or (place > 0 and not texts[place - 1])
            if is_part and (raw := self._token_bytes(ids[place])) and raw.decode(errors="ignore").encode() != raw:
                found[place] = raw.hex(" ").upper()
        return found

    def _token_bytes(self, index: int) -> bytes:
        token = self._backend.id_to_token(index)
        if token is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if self._byte_level:
            with suppress(KeyError):  # an added token, which is ordinary text
                return bytes(_BYTES[character] for character in token)
        return b""


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes are numbered from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def load_tokens(folder: RunFolder) -> tuple[RunTokenizer | None, str | None]:
    """The tokenizer of a run, or why there is none. May take seconds."""
    problems = []
    for path in _candidates(folder):
        try:
            return RunTokenizer(_load(path)), None
        except Exception as error:  # damaged files make the libraries raise any exception
            problems.append(f"{path} cannot be read ({describe_error(error, 120)})")
    if problems:
        return None, f"no tokenizer: {problems[0]}"
    return None, f"no tokenizer in the run's checkpoints: copy the model's {FILE} to {folder.path / 'tokenizer'}"


def _candidates(folder: RunFolder) -> Iterator[Path]:
    """Files and folders with a tokenizer, the run's own first."""
    checkpoints = [f"checkpoints/{name}/model" for name in reversed(folder.names("checkpoints"))]
    for name in ("tokenizer", *checkpoints, "base", "reference"):
        with suppress(OSError), folder.open(f"{name}/{FILE}"):
            yield folder.place(f"{name}/{FILE}")
    environment = folder.document("environment.json")
    for key in ("tokenizer", "source"):
        source = setting(folder.config(), f"model.{key}")
        if isinstance(source, str) and source and "\0" not in source and ":" not in source:
            yield from _local(source, environment)


def _local(source: str, environment: Mapping[str, Any]) -> Iterator[Path]:
    """A model on this machine: a path, also relative to the folder of the run's command, or in the hub's cache."""
    started_in = environment.get("folder")
    path = Path(source).expanduser()
    bases = [Path(), *([Path(started_in)] if isinstance(started_in, str) and "\0" not in started_in else [])]
    for base in bases:
        with suppress(OSError):
            full = base / path
            if full.is_file() and full.suffix.lower() == ".gguf":
                yield full
            elif (full / FILE).is_file():
                yield full / FILE
            elif full.is_dir():
                yield full
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        with suppress(Exception):  # not in the cache, or not a valid name
            from huggingface_hub import try_to_load_from_cache

            if isinstance(cached := try_to_load_from_cache(source, FILE), str):
                yield Path(cached)


def _load(path: Path) -> Any:
    if path.name == FILE:
        from tokenizers import Tokenizer as Backend  # much faster than transformers, whose import takes seconds

        if path.stat().st_size > MAX_TOKENIZER:
            raise UserError(f"it has more than {MAX_TOKENIZER >> 20} MiB")
        return Backend.from_file(str(path))
    from assay.text.tokenizer import load_tokenizer

    return load_tokenizer(str(path)).hf.backend_tokenizer
