"""The index of a run's rollouts, in the user's cache folder.

Each rollout file has one file in the index, with arrays of what lists, filters and searches need. It is valid for one
size, time and inode of the rollout file, so only new and changed files are read again. The index can be deleted at any
time; damaged files of it are replaced.

Lists are filtered and ordered with NumPy (see `table`). SQLite took ten times as long: 140 to 180 ms for a sorted page
of 100,000 rollouts, and as much for a search with many hits, in addition to the scan of the texts. Texts are stored
without case, one after the other, and searched from the beginning to the end. A trigram index (FTS5) of 100,000 answers
was three times slower for frequent words, and took a hundred times longer to build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from assay.runs.directory import Refused, reason_of
from assay.runs.files import JsonLine, json_lines, stamp_of, user_folder
from assay.runs.rollouts import DAMAGE, SCHEMA, newer_schema
from assay.types import Finish, Status, describe_error
from assay.web.folder import RunFolder, finite_number

VERSION = 3  # of the index; others are not read
TRAIN = "train"  # name of the source of training rollouts; evaluations are named after their files
SKIPPED = "skipped"  # batches whose update was skipped
FOLDERS = {TRAIN: "rollouts", SKIPPED: "skipped", "eval": "evals"}
STATUSES = ("", *map(str, Status))  # by code; 0 for answers without a verdict
FINISHES = ("", *map(str, Finish))
LABELS = ("start", "before", "eval", "after")  # of evaluations, in the order in which they take place
PREVIEW = 240  # characters
MAX_TEXT = 200_000  # characters of an answer that can be searched
MAX_QUESTION = 4_000
MAX_ARRAYS = 2**31  # bytes of the arrays of one step
LISTED = 5  # problems of a file
UNUSED_DAYS = 60  # after which the index of a run is deleted
END = b"\0"  # after each text
WAIT_S = 0.1  # at most, until the requests are answered
WORK_S = 0.01  # at least, between two waits: the index also grows while there are always requests
ROW = np.dtype(
    [
        *(("index", "i4"), ("start", "i8"), ("size", "i4"), ("group", "i4"), ("sample", "i4"), ("prompt", "i4")),
        *(("status", "u1"), ("finish", "u1"), ("truncated", "?"), ("version", "i4"), ("turns", "i4")),
        *(("length", "i4"), ("reward", "f8"), ("advantage", "f8"), ("text_end", "i8")),
        ("question", "u8"),  # equal for the same id, messages and gold answer; of evaluations only
    ]
)
_CODES = {name: code for code, name in enumerate(STATUSES)}
_FINISH_CODES = {name: code for code, name in enumerate(FINISHES)}
_STEP_FILE = re.compile(r"step-(\d{6,9})(?:-(.+))?\.jsonl")


@dataclass(frozen=True, eq=False)
class IndexedFile:
    """The rollouts of one step or evaluation. A file that has changed becomes a new object."""

    name: str  # e.g. rollouts/step-000012.jsonl
    stamp: str  # size, time and inode of the file
    rows: np.ndarray  # of type ROW
    previews: Sequence[str]  # the beginning of each answer
    prompts: Sequence[tuple[str, str]]  # id and question; `prompt` of a row is a position in this list
    problems: Sequence[str]

    def position(self, index: int) -> int | None:
        """The row of a line; None if the line is missing or damaged."""
        position = int(np.searchsorted(self.rows["index"], index))
        return position if position < len(self.rows) and self.rows["index"][position] == index else None

    @cached_property
    def place(self) -> Place:
        place = place_of(self.name)
        assert place is not None
        return place


@dataclass(frozen=True)
class Place:
    """What the name of a rollout file says."""

    source: str  # "train", "skipped", or the name of the evaluation
    step: int
    label: str = ""
    split: str = ""

    @property
    def is_evaluation(self) -> bool:
        return self.source not in (TRAIN, SKIPPED)

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Training steps first, then skipped batches, then evaluations, each in the order in which they took place."""
        kind = 2 if self.is_evaluation else int(self.source == SKIPPED)
        rank = LABELS.index(self.label) if self.label in LABELS else len(LABELS)
        return kind, self.step, rank, self.source


def place_of(name: str) -> Place | None:
    """None for a file that is not one of a step or evaluation."""
    folder, _, file = name.partition("/")
    match = _STEP_FILE.fullmatch(file)
    if match is None or f"{int(match[1]):06d}" != match[1]:
        return None
    if folder in (FOLDERS[TRAIN], FOLDERS[SKIPPED]):
        return None if match[2] else Place(TRAIN if folder == FOLDERS[TRAIN] else SKIPPED, int(match[1]))
    label, _, split = (match[2] or "").partition("-")
    return Place(file.removesuffix(".jsonl"), int(match[1]), label, split)


def file_name(source: str, step: int) -> str:
    """The name of a rollout file; see `Place`."""
    if source in (TRAIN, SKIPPED):
        return f"{FOLDERS[source]}/step-{step:06d}.jsonl"
    return f"{FOLDERS['eval']}/{source}.jsonl"


# Reading rollout files


def nothing() -> None: ...


def read_file(
    folder: RunFolder, name: str, stamp: str = "", pause: Callable[[], None] = nothing
) -> tuple[IndexedFile, bytes]:
    """Read a rollout file, and check that its arrays match. Problems are described, not raised.

    Also returns its texts, as `fold` returns them, each with END after it. `pause` is called after each line.
    """
    has_arrays = not name.startswith(f"{FOLDERS['eval']}/")
    reader = _Reader(name, with_questions=not has_arrays)
    try:
        with folder.open(name) as file:
            for line in json_lines(file):
                reader.add(line)
                pause()
    except OSError as error:
        reader.problems.append(reason_of(name, error))
    if reader.damaged > LISTED:
        reader.problems.append(f"{name}: {reader.damaged} lines cannot be read")
    if reader.schema > SCHEMA:
        reader.problems.append(newer_schema(name, reader.schema))
    if has_arrays and (problem := arrays_problem(folder, name, reader.lines)):
        reader.problems.append(problem)
    rows, prompts = np.array(reader.rows, ROW), list(reader.prompts.items())
    return IndexedFile(name, stamp, rows, reader.previews, prompts, reader.problems), b"".join(reader.texts)


class _Reader:
    def __init__(self, name: str, with_questions: bool) -> None:
        self._name, self._with_questions = name, with_questions
        self.lines = self.damaged = 0
        self.schema = 1  # the newest
        self.problems: list[str] = []
        self.rows: list[tuple[Any, ...]] = []
        self.texts: list[bytes] = []
        self.previews: list[str] = []
        self.prompts: dict[str, str] = {}  # questions by id
        self._numbers: dict[str, int] = {}  # of prompts
        self._text_end = 0

    def add(self, line: JsonLine) -> None:
        self.lines = line.number
        if line.value is not None:
            self._add_rollout(line.value, line)
            return
        self.damaged += 1
        if self.damaged <= LISTED:
            what = "is not a rollout" if line.is_complete else "is incomplete"
            self.problems.append(f"{self._name}, line {line.number}: {what}")

    def _add_rollout(self, value: Mapping[str, Any], line: JsonLine) -> None:
        verdict = value["verdict"] if isinstance(value.get("verdict"), dict) else {}
        text = value["text"] if isinstance(value.get("text"), str) else ""
        detail = verdict.get("detail")
        folded = fold(text[:MAX_TEXT] + (f"\n{detail[:MAX_QUESTION]}" if isinstance(detail, str) else ""))
        self.texts += folded, END
        self._text_end += len(folded) + 1
        self.previews.append(" ".join(text[: 4 * PREVIEW].split())[:PREVIEW])
        self.schema = max(self.schema, integer(value.get("schema"), 1))
        prompt = str(value.get("prompt_id"))[:1000]
        if prompt not in self.prompts:
            self._numbers[prompt] = len(self.prompts)
            self.prompts[prompt] = question_of(value.get("messages"))[:MAX_QUESTION]
        turns = value.get("turns")
        self.rows.append(
            (
                *(line.number - 1, line.start, line.size),
                *(integer(value.get("group"), -1), integer(value.get("sample"))),
                self._numbers[prompt],
                _CODES.get(_key(verdict.get("status")), 0),
                _FINISH_CODES.get(_key(value.get("finish")), 0),
                value.get("truncated") is True,
                integer(value.get("version")),
                len(turns) if isinstance(turns, list) else 1,
                integer(value.get("length")),
                *(_float(value.get(name)) for name in ("reward", "advantage")),
                self._text_end,
                question_hash(value) if self._with_questions else 0,
            )
        )


def question_of(messages: Any) -> str:
    """The last message of the user."""
    for message in reversed(messages) if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return message["content"]
    return ""


def question_hash(line: Mapping[str, Any]) -> int:
    """Identifies the question: by id, messages except system messages, and gold answer."""
    messages = line.get("messages")
    asked = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") != "system"
    ]
    key = json.dumps([str(line.get("prompt_id")), asked, str(line.get("answer"))])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def fold(text: str) -> bytes:
    """The text as it is searched: without case, and without the byte that ends a text."""
    # Lone surrogates, which are valid in JSON, become question marks.
    return text.casefold().encode("utf-8", "replace").replace(END, b" ")


def integer(value: Any, default: int = 0) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else default


def _key(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _float(value: Any) -> float:
    number = finite_number(value)
    return float("nan") if number is None else float(number)


ARRAY_ERRORS = (OSError, *DAMAGE)
_ARRAY_HEADER = re.compile(rb"\{'descr': '([<|][biuf]\d)', 'fortran_order': False, 'shape': \((\d{0,12}),?\), \} *\n?")


def read_arrays(folder: RunFolder, name: str, only: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The arrays next to a rollout file, or those with the given names. Raises one of ARRAY_ERRORS.

    Not with `numpy.load`, which evaluates headers with `ast`: that fails at times in several threads (Python 3.11), and
    a header may claim any size.
    """
    with folder.open(arrays_name(name)) as file, zipfile.ZipFile(file) as members:
        if sum(member.file_size for member in members.infolist()) > MAX_ARRAYS:
            raise Refused(f"{arrays_name(name)} takes more than {MAX_ARRAYS >> 20} MiB")
        wanted = only or [member.removesuffix(".npy") for member in members.namelist()]
        return {array: parsed_array(members.read(f"{array}.npy")) for array in wanted}


def parsed_array(content: bytes) -> np.ndarray:
    """An array of numbers in the format of numpy, with one dimension or none."""
    size = int.from_bytes(content[8:10], "little")
    header = _ARRAY_HEADER.fullmatch(content[10 : 10 + size])
    if content[:8] != b"\x93NUMPY\x01\x00" or header is None:
        raise ValueError("not an array of numbers")
    array = np.frombuffer(content, header[1].decode(), offset=10 + size)
    if len(array) != int(header[2] or 1):
        raise ValueError("an array is incomplete")
    return array


def arrays_name(name: str) -> str:
    return name.removesuffix(".jsonl") + ".npz"


def unreadable_arrays(name: str, error: BaseException) -> str:
    missing = isinstance(error, FileNotFoundError)
    return f"{name} is missing: its tokens cannot be shown" if missing else reason_of(name, error)


def arrays_problem(folder: RunFolder, name: str, lines: int) -> str | None:
    """Why the arrays of a rollout file cannot be shown; None if they can."""
    arrays_file = arrays_name(name)
    try:
        offsets = read_arrays(folder, name, ["offsets"])["offsets"]
    except ARRAY_ERRORS as error:
        return unreadable_arrays(arrays_file, error)
    if len(offsets) != lines + 1:
        return f"{name} has {lines} lines, and {arrays_file} has {max(len(offsets) - 1, 0)} answers: they do not match"
    with suppress(*ARRAY_ERRORS):  # files of version 1 have none
        newest = int(read_arrays(folder, name, ["schema"])["schema"][0])
        if newest > SCHEMA:
            return newer_schema(arrays_file, newest)
    return None


# One rollout as the page shows it: its line and the values of its tokens


def problem_of_arrays(file: IndexedFile, error: BaseException) -> str:
    """Why there are no tokens: as found when the file was indexed, or now."""
    found = (problem for problem in file.problems if ".npz" in problem)
    return next(found, unreadable_arrays(arrays_name(file.name), error))


def skip_reason(document: Mapping[str, Any]) -> str:
    """Why updates with a batch were skipped, from the file next to the batch."""
    updates = [update for update in document.get("updates") or () if isinstance(update, dict) and update.get("what")]
    if not updates:
        return "its update was skipped"
    count = f"{len(updates)} updates were" if len(updates) > 1 else "an update was"
    return f"{count} skipped, because {updates[0]['what']} is not finite"


def context_spans(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Begin and end of the context of each turn, in tokens of the rollout."""
    spans, at = [], 0
    for turn in line.get("turns") or []:
        context, written = integer(turn.get("context_tokens")), integer(turn.get("tokens"))
        spans.append((at, at + context))
        at += context + written
    return spans


def token_columns(arrays: Mapping[str, np.ndarray], index: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """Values of each token of a rollout. Log-probabilities are None for tokens that the policy did not sample."""
    offsets = arrays["offsets"]
    start, end = int(offsets[index]), int(offsets[index + 1])
    ids = arrays["token_ids"][start:end]
    if not 0 <= start <= end or len(ids) != end - start:
        raise ValueError("its offsets do not match its tokens")
    mask = arrays["loss_mask"][start:end] == 1
    sampled = np.ones(len(ids), bool)
    for first, last in context_spans(line):
        sampled[first:last] = False
    if len(mask) != len(ids) or (mask & ~sampled).any():
        raise ValueError("its mask does not match the turns")

    def values(name: str, where: np.ndarray) -> list[float | None] | None:
        if name not in arrays:
            return None
        token_values = arrays[name][start:end].astype(float)
        if len(token_values) != len(ids):
            raise ValueError(f"{name} has another length than the tokens")
        known = where & np.isfinite(token_values)
        listed = (
            token_values.tolist()
            if known.all()
            else [value if ok else None for value, ok in zip(token_values, known, strict=True)]
        )
        return listed if known.any() else None

    advantages = values("token_advantages", mask) if line.get("by_token") else None
    advantage = finite_number(line.get("advantage"))
    if advantages is None and advantage is not None:
        advantages = [advantage if trained else None for trained in mask.tolist()]
    return {
        "ids": ids.tolist(),
        "mask": mask.astype(int).tolist(),
        "sampled": sampled.astype(int).tolist(),
        **{name: values(name, sampled) for name in ("engine_logprobs", "sampling_logprobs")},
        **{name: values(name, mask) for name in ("trainer_logprobs", "ref_logprobs", "entropies")},
        "advantages": advantages,
    }


def turns_of(line: Mapping[str, Any], contexts: Sequence[str] | None) -> list[dict[str, Any]]:
    """The episode as a list of contexts (a prompt or an observation) and actions (what the policy wrote)."""
    turns = line.get("turns")
    if not isinstance(turns, list) or not turns:
        facts = {"text": line.get("text"), "tokens": line.get("length"), "finish": line.get("finish")}
        return [{"role": "action", **facts}]
    found: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        text = contexts[number] if contexts is not None and number < len(contexts) else None
        found.append({"role": "context", "text": text, "tokens": turn.get("context_tokens")})
        found.append({**{key: value for key, value in turn.items() if key != "context_tokens"}, "role": "action"})
    return found


def cleaned(value: Any) -> Any:
    """A line of a rollout file: names of numbers that are not finite become None; turns are dictionaries."""
    line = dict(value)
    for name in ("reward", "advantage"):
        if name in line:
            line[name] = finite_number(line[name])
    verdict = line.get("verdict")
    if isinstance(verdict, dict):
        parts = verdict.get("parts")
        line["verdict"] = {
            **verdict,
            "reward": finite_number(verdict.get("reward")),
            "parts": {k: finite_number(v) for k, v in parts.items()} if isinstance(parts, dict) else {},
        }
    turns = line.get("turns")
    line["turns"] = [dict(turn) for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    for turn in line["turns"]:
        turn |= {name: finite_number(turn[name]) for name in ("reward", "kept_mass", "entropy") if name in turn}
    return line


# The files of the index


def cache_folder() -> Path:
    """The folder of all indexes. Raises OSError if it cannot be created."""
    folder = user_folder("XDG_CACHE_HOME", ".cache") / "view"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} belongs to another user, or is not writable")
    return folder


def delete_unused(folder: Path, days: float = UNUSED_DAYS) -> None:
    """Delete indexes that were not used for a long time."""
    for path in folder.iterdir():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > days * 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class Store:
    """The index of one run: a folder with one ZIP file for each rollout file. The checksums in it reveal damage."""

    def __init__(self, run_path: Path) -> None:
        """In the user's cache folder, or in a temporary one if that is not writable."""
        name = hashlib.sha256(os.fsencode(run_path.resolve())).hexdigest()[:32]
        try:
            delete_unused(cache_folder())
            self.folder = cache_folder() / f"{name}-{VERSION}"
            self.folder.mkdir(exist_ok=True)
            os.utime(self.folder)
        except (OSError, RuntimeError):  # there may be no home folder
            self._temporary = tempfile.TemporaryDirectory(prefix="assay-view-")
            self.folder = Path(self._temporary.name)

    def path(self, name: str) -> Path:
        return (self.folder / name).with_suffix(".zip")

    def keep(self, names: Mapping[str, str]) -> set[Path]:
        """Delete the files of other names. Returns the paths of those that are there."""
        wanted, found = {self.path(name) for name in names}, set(self.folder.glob("*/*.zip"))
        for path in found - wanted:
            path.unlink(missing_ok=True)
        return found & wanted

    def load(self, name: str, stamp: str) -> IndexedFile | None:
        """None if there is nothing about this state of the rollout file, or if it is damaged."""
        with suppress(*ARRAY_ERRORS), zipfile.ZipFile(self.path(name)) as members:
            facts = json.loads(members.read("facts"))
            if facts.pop("stamp") == stamp:
                return IndexedFile(name, stamp, np.frombuffer(members.read("rows"), ROW), **facts)
        return None

    def save(self, file: IndexedFile, texts: bytes) -> None:
        path, temporary = self.path(file.name), self.folder / f"{threading.get_native_id()}.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {name: getattr(file, name) for name in ("stamp", "previews", "prompts", "problems")}
        with zipfile.ZipFile(temporary, "w") as members:
            members.writestr("facts", json.dumps(facts))
            members.writestr("rows", file.rows.tobytes())
            members.writestr("texts", texts)
        os.replace(temporary, path)

    def texts(self, file: IndexedFile) -> bytes:
        """The texts of a file, see `read_file`; empty if they are damaged, so that `RunIndex` must read it again."""
        try:
            with zipfile.ZipFile(self.path(file.name)) as members:
                return members.read("texts")
        except ARRAY_ERRORS:
            with suppress(OSError):
                self.path(file.name).unlink()
            return b""


class RunIndex:
    """The index of a run, which `update` keeps equal to the files of the run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.store = Store(folder.root)
        self.names = dict(self._listed())  # stamps of the rollout files of the run, in the order in which they are read
        self.files: dict[str, IndexedFile] = {}  # by name; replaced if there is a change
        self.problem: str | None = None  # of the index itself

    def update(self, seconds: float = 0.5) -> bool:
        """Read new and changed files for some seconds. Returns whether there are more."""
        try:
            more = self._update(time.monotonic() + seconds)
        except OSError as error:
            self.problem = f"the index {self.store.folder} cannot be used ({describe_error(error)})"
            return False
        self.problem = None
        return more

    def _update(self, deadline: float) -> bool:
        self.names = dict(self._listed())
        stored = self.store.keep(self.names)
        files = {
            name: file
            for name, file in self.files.items()
            if self.names.get(name) == file.stamp and self.store.path(name) in stored
        }
        waiting = [name for name in self.names if name not in files]
        for name in waiting:
            known = self.store.load(name, self.names[name])
            files[name] = known or self._read(name)
            if known is None and time.monotonic() > deadline:
                break
        if files != self.files:
            self.files = files
        return len(files) < len(self.names)

    def _read(self, name: str) -> IndexedFile:
        file, texts = read_file(self.folder, name, self.names[name], activity.give_way)
        self.store.save(file, texts)
        return file

    def _listed(self) -> Iterator[tuple[str, str]]:
        """Names and stamps of the rollout files: training is the last, because its files are many."""
        for folder in reversed(FOLDERS.values()):
            for name in self.folder.names(folder):
                path = f"{folder}/{name}"
                if place_of(path) and (stamp := stamp_of(self.folder.root / path)):
                    has_arrays = folder != FOLDERS["eval"]
                    arrays = stamp_of((self.folder.root / path).with_suffix(".npz")) if has_arrays else None
                    yield path, repr((stamp, arrays))

    @property
    def progress(self) -> dict[str, int]:
        """How many of the run's rollout files are in the index."""
        files, names = self.files, self.names
        done = sum(name in files and files[name].stamp == stamp for name, stamp in names.items())
        return {"done": done, "total": len(names)}


# Priority of requests


class Activity:
    """Counts the requests that are being answered: `with activity:` around each of them.

    They have priority over the index: Python runs one thread at a time, so both would be slow together.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._wait_again = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self.requests += 1
            self._idle.clear()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self.requests -= 1
            if not self.requests:
                self._idle.set()

    def give_way(self) -> None:
        """Wait a moment while there are requests. For one thread, which calls this often."""
        if self.requests and time.monotonic() > self._wait_again:
            self._idle.wait(WAIT_S)
            self._wait_again = time.monotonic() + WORK_S

    def share(self, seconds: float) -> float:
        """The part of this time that a request may use, together with the others."""
        return seconds / max(self.requests, 1)


activity = Activity()  # of this process
