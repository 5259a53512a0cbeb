"""The index of a run's rollouts, in a SQLite file of the user's cache folder.

Each rollout file has one row in the database, with arrays of what lists, filters and searches need. A row is valid for
one size, time and inode of its files, so only new and changed files are read again. The index can be deleted at any
time; a damaged one is rebuilt.

Texts are stored without case, one after the other, and searched from the beginning to the end. A trigram index (FTS5)
of 100,000 answers was three times slower for frequent words, and took a hundred times longer to build.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from assay.runs.rollouts import SCHEMA
from assay.types import Finish, Status, describe_error
from assay.web.folder import Refused, RunFolder, finite_number, stamp_of

VERSION = 2  # of the database; another version is rebuilt
TRAIN = "train"  # name of the source of training rollouts; evaluations are named after their files
SKIPPED = "skipped"  # batches whose update was skipped
FOLDERS = {TRAIN: "rollouts", SKIPPED: "skipped", "eval": "evals"}
STATUSES = ("", *map(str, Status))  # by code; 0 for answers without a verdict
FINISHES = ("", *map(str, Finish))
LABELS = ("start", "before", "eval", "after")  # of evaluations, in the order in which they take place
PREVIEW = 240  # bytes
MAX_TEXT = 200_000  # characters of an answer that can be searched
MAX_QUESTION = 4_000
MAX_LINE = 64 * 2**20  # bytes of one rollout
MAX_ARRAYS = 2**31  # bytes of the arrays of one step
LISTED = 5  # problems of a file
UNUSED_DAYS = 60  # after which the index of a run is deleted
END = b"\0"  # after each text
ROW = np.dtype(
    [
        *(("index", "i4"), ("start", "i8"), ("size", "i4"), ("group", "i4"), ("sample", "i4"), ("prompt", "i4")),
        *(("status", "u1"), ("finish", "u1"), ("truncated", "?"), ("version", "i4"), ("turns", "i4")),
        *(("length", "i4"), ("reward", "f8"), ("advantage", "f8"), ("text_end", "i8"), ("preview_end", "i8")),
        ("question", "u8"),  # equal for the same id, messages and gold answer; of evaluations only
    ]
)
_CODES = {name: code for code, name in enumerate(STATUSES)}
_FINISH_CODES = {name: code for code, name in enumerate(FINISHES)}
_STEP_FILE = re.compile(r"step-(\d{6,9})(?:-(.+))?\.jsonl")
_DAMAGE = (
    "malformed",
    "not a database",
    "no such table",
    "no such column",
    "disk image",
    "encrypted",
    "decode to UTF-8",
)
_TABLES = (
    "CREATE TABLE files (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, stamp TEXT, rows BLOB, prompts TEXT, "
    "problems TEXT, digest BLOB, previews BLOB)",
    "CREATE TABLE texts (id INTEGER PRIMARY KEY, texts BLOB)",
)


@dataclass(frozen=True)
class IndexedFile:
    """The rollouts of one step or evaluation."""

    id: int  # in the database
    name: str  # e.g. rollouts/step-000012.jsonl
    stamp: str
    rows: np.ndarray  # of type ROW
    prompts: list[tuple[str, str]]  # id and question; `prompt` of a row is a position in this list
    problems: list[str]

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


@dataclass
class Content:
    """What is stored for a rollout file."""

    rows: np.ndarray
    texts: bytes
    previews: bytes
    prompts: list[tuple[str, str]]
    problems: list[str]


# Reading rollout files


def nothing() -> None: ...


def read_file(folder: RunFolder, name: str, pause: Callable[[], None] = nothing) -> Content:
    """Read the lines of a rollout file, and check that its arrays match. Problems are described, not raised.

    `pause` is called after each line.
    """
    has_arrays = not name.startswith(f"{FOLDERS['eval']}/")
    reader = _Reader(with_questions=not has_arrays)
    try:
        with folder.open(name) as file:
            reader.read(file, name, pause)
    except OSError as error:
        reader.problems.append(reason_of(name, error))
    if has_arrays and (problem := arrays_problem(folder, name, reader.lines)):
        reader.problems.append(problem)
    return reader.content()


def reason_of(name: str, error: BaseException) -> str:
    return str(error) if isinstance(error, Refused) else f"{name} cannot be read ({describe_error(error)})"


class _Reader:
    def __init__(self, with_questions: bool) -> None:
        self._with_questions = with_questions
        self.lines = 0
        self.problems: list[str] = []
        self._rows: list[tuple[Any, ...]] = []
        self._texts: list[bytes] = []
        self._previews: list[bytes] = []
        self._text_end = self._preview_end = 0
        self._prompts: dict[str, tuple[int, str]] = {}

    def read(self, file: IO[bytes], name: str, pause: Callable[[], None]) -> None:
        start, bad, newest = 0, 0, 1
        while line := file.readline(MAX_LINE):
            is_complete = line.endswith(b"\n")
            value = parsed_line(line)
            if value is None:
                bad += 1
                what = "is not a rollout" if is_complete else "is incomplete"
                if bad <= LISTED:
                    self.problems.append(f"{name}, line {self.lines + 1}: {what}")
            else:
                newest = max(newest, integer(value.get("schema"), 1))
                self._add(value, start, len(line))
            start += len(line)
            self.lines += 1
            pause()
        if bad > LISTED:
            self.problems.append(f"{name}: {bad} lines cannot be read")
        if newest > SCHEMA:
            self.problems.append(f"{name} has schema version {newest}, newer than {SCHEMA}: read it with a newer assay")

    def _add(self, line: Mapping[str, Any], start: int, size: int) -> None:
        verdict = line["verdict"] if isinstance(line.get("verdict"), dict) else {}
        text = line["text"] if isinstance(line.get("text"), str) else ""
        detail = verdict.get("detail")
        searched = text[:MAX_TEXT] + (f"\n{detail[:MAX_QUESTION]}" if isinstance(detail, str) else "")
        folded = fold(searched)
        preview = as_bytes(" ".join(text[: 4 * PREVIEW].split()))[:PREVIEW]
        self._texts += folded, END
        self._previews.append(preview)
        self._text_end += len(folded) + 1
        self._preview_end += len(preview)
        turns = line.get("turns")
        self._rows.append(
            (
                *(self.lines, start, size, integer(line.get("group"), -1), integer(line.get("sample"))),
                self._prompt(line),
                _CODES.get(_key(verdict.get("status")), 0),
                _FINISH_CODES.get(_key(line.get("finish")), 0),
                line.get("truncated") is True,
                integer(line.get("version")),
                len(turns) if isinstance(turns, list) else 1,
                integer(line.get("length")),
                *(_float(line.get(name)) for name in ("reward", "advantage")),
                *(self._text_end, self._preview_end),
                question_hash(line) if self._with_questions else 0,
            )
        )

    def _prompt(self, line: Mapping[str, Any]) -> int:
        """Position of the prompt among those of the file."""
        identifier = str(line.get("prompt_id"))[:1000]
        if identifier not in self._prompts:
            self._prompts[identifier] = len(self._prompts), question_of(line.get("messages"))[:MAX_QUESTION]
        return self._prompts[identifier][0]

    def content(self) -> Content:
        prompts = [(identifier, question) for identifier, (_, question) in self._prompts.items()]
        rows = np.array(self._rows, ROW)
        return Content(rows, b"".join(self._texts), b"".join(self._previews), prompts, self.problems)


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The object in a line of JSON; None if it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def question_of(messages: Any) -> str:
    """The last message of the user."""
    for message in reversed(messages) if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return message["content"]
    return ""


def question_hash(line: Mapping[str, Any]) -> int:
    """Identifies the question as `assay.evals.pairs` does: by id, messages except those of the system, gold answer."""
    messages = line.get("messages")
    asked = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and message.get("role") != "system"
    ]
    key = json.dumps([str(line.get("prompt_id")), asked, str(line.get("answer"))])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # lone surrogates, which are valid in JSON, become question marks


def fold(text: str) -> bytes:
    """The text as it is searched: without case, and without the byte that ends a text."""
    return as_bytes(text.casefold()).replace(END, b" ")


def integer(value: Any, default: int = 0) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else default


def _key(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _float(value: Any) -> float:
    number = finite_number(value)
    return float("nan") if number is None else float(number)


ARRAY_ERRORS = (OSError, ValueError, LookupError, EOFError, MemoryError, NotImplementedError, zipfile.BadZipFile)
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


def arrays_problem(folder: RunFolder, name: str, lines: int) -> str | None:
    """Why the arrays of a rollout file cannot be shown; None if they can."""
    own = arrays_name(name)
    try:
        offsets = read_arrays(folder, name, ["offsets"])["offsets"]
    except FileNotFoundError:
        return f"{own} is missing: its tokens cannot be shown"
    except ARRAY_ERRORS as error:
        return reason_of(own, error)
    if len(offsets) != lines + 1:
        return f"{name} has {lines} lines, and {own} has {max(len(offsets) - 1, 0)} answers: they do not match"
    with suppress(*ARRAY_ERRORS):  # files of version 1 have none
        newest = int(read_arrays(folder, name, ["schema"])["schema"][0])
        if newest > SCHEMA:
            return f"{own} has schema version {newest}, newer than {SCHEMA}: read it with a newer assay"
    return None


# The database


def cache_folder() -> Path:
    """The folder of all indexes. Raises OSError if it cannot be created."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "assay" / "view"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.geteuid() or not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} belongs to another user, or is not writable")
    return folder


def delete_unused(folder: Path, days: float = UNUSED_DAYS) -> None:
    """Delete indexes that were not used for a long time."""
    for path in folder.glob("*.sqlite"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > days * 86400:
                _delete(path)


def _delete(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def digest_of(*facts: Any) -> bytes:
    return hashlib.blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_damage(error: Exception) -> bool:
    """Whether the database must be rebuilt. A locked database or a full disk are no damage."""
    if isinstance(error, UnicodeDecodeError):  # a text of the database itself, e.g. in its schema
        return True
    return isinstance(error, sqlite3.DatabaseError) and any(text in str(error) for text in _DAMAGE)


@dataclass
class Store:
    """The database of one run. Each call opens it, so that threads and processes do not share connections."""

    path: Path
    damaged: bool = False  # found while reading; `RunIndex.update` then rebuilds it
    _temporary: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, run_path: Path) -> Store:
        """In the user's cache folder, or in a temporary one if that is not writable."""
        name = hashlib.sha256(os.fsencode(run_path.resolve())).hexdigest()[:32] + ".sqlite"
        with suppress(OSError, RuntimeError):  # there may be no home folder
            folder = cache_folder()
            delete_unused(folder)
            path = folder / name
            if path.is_file() or not os.path.lexists(path):
                return cls(path)
        temporary = tempfile.TemporaryDirectory(prefix="assay-view-")
        return cls(Path(temporary.name) / name, _temporary=temporary)

    def connect(self) -> closing[sqlite3.Connection]:
        """A connection to a database with the current schema."""
        connection = self._open()
        try:
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, VERSION):
                raise sqlite3.DatabaseError("malformed: another version")
            if found == 0:
                connection.execute("PRAGMA journal_mode = WAL")
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'files'").fetchone():
                        for table in _TABLES:
                            connection.execute(table)
                    connection.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            connection.close()
            raise
        return closing(connection)

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10.0, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")  # after a power failure, a damaged index is rebuilt
        return connection

    def reset(self) -> None:
        _delete(self.path)
        self.damaged = False

    def load(self, known: Mapping[int, IndexedFile]) -> dict[int, IndexedFile]:
        """All files of the index. Those that are known already are not read again."""
        with self.connect() as connection:
            ids = [row[0] for row in connection.execute("SELECT id FROM files")]
            fresh = [number for number in ids if number not in known]
            query = "SELECT id, digest, name, stamp, rows, prompts, problems FROM files WHERE id = ?"
            rows = [connection.execute(query, (number,)).fetchone() for number in fresh]
        loaded = {row[0]: self._file(*row) for row in rows if row}
        return {number: known.get(number) or loaded[number] for number in ids if number in known or number in loaded}

    def _file(
        self, number: int, digest: bytes, name: str, stamp: str, rows: bytes, prompts: str, problems: str
    ) -> IndexedFile:
        if digest != digest_of(name, stamp, rows, prompts, problems):
            raise sqlite3.DatabaseError("malformed: a row was changed")
        pairs = [(identifier, question) for identifier, question in json.loads(prompts)]
        return IndexedFile(number, name, stamp, np.frombuffer(rows, ROW), pairs, json.loads(problems))

    def write(self, name: str, stamp: str, content: Content) -> None:
        facts = (name, stamp, content.rows.tobytes(), json.dumps(content.prompts), json.dumps(content.problems))
        with self.connect() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            found = connection.execute("SELECT id, stamp FROM files WHERE name = ?", (name,)).fetchone()
            if found is not None and found[1] == stamp:  # another process was faster
                return
            if found is not None:
                self._delete_rows(connection, found[0])
            insert = "INSERT INTO files (name, stamp, rows, prompts, problems, digest, previews) VALUES (?,?,?,?,?,?,?)"
            number = connection.execute(insert, (*facts, digest_of(*facts), content.previews)).lastrowid
            connection.execute("INSERT INTO texts VALUES (?, ?)", (number, content.texts))

    def delete(self, ids: Sequence[int]) -> None:
        with self.connect() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            for number in ids:
                self._delete_rows(connection, number)

    def _delete_rows(self, connection: sqlite3.Connection, number: int) -> None:
        for table in ("texts", "files"):
            connection.execute(f"DELETE FROM {table} WHERE id = ?", (number,))

    def texts(self, number: int) -> bytes:
        """The texts of a file, as `fold` returns them, each with END after it; empty if it was deleted."""
        return self._blobs("SELECT texts FROM texts WHERE id = ?", [(number,)])[0]

    def previews(self, wanted: Sequence[tuple[int, int, int]]) -> list[str]:
        """The beginnings of answers, by file, first byte and end."""
        places = [(start + 1, end - start, number) for number, start, end in wanted]
        found = self._blobs("SELECT substr(previews, ?, ?) FROM files WHERE id = ?", places)
        return [blob.decode("utf-8", "ignore") for blob in found]

    def _blobs(self, query: str, parameters: Sequence[tuple[int, ...]]) -> list[bytes]:
        """The blob that each query finds; empty if there is none, or if the database is damaged."""
        try:
            with self.connect() as connection:
                found = [connection.execute(query, values).fetchone() for values in parameters]
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self.damaged, found = True, [None] * len(parameters)
        # A part of an empty blob is NULL.
        return [row[0] if row and isinstance(row[0], bytes) else b"" for row in found]


class RunIndex:
    """The index of a run, which `update` keeps equal to the files of the run."""

    def __init__(self, folder: RunFolder, pause: Callable[[], None] = nothing) -> None:
        """`pause` is called often while files are read."""
        self.folder, self.pause = folder, pause
        self.store = Store.of(folder.root)
        self.names: dict[str, str] = {}  # stamps of the rollout files of the run, in the order in which they are read
        self.files: dict[int, IndexedFile] = {}
        self.problem: str | None = None  # of the index itself
        self.complete = threading.Event()  # set when all files were read at least once
        self._loaded = False

    def update(self, seconds: float = 0.5) -> bool:
        """Read new and changed files for some seconds. Returns whether there are more."""
        try:
            more = self._update(time.monotonic() + seconds)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if is_damage(error):
                self.store.reset()
                self.files, self._loaded = {}, False
                return True
            self.problem = f"the index {self.store.path} cannot be used ({describe_error(error)})"
            return False
        self.problem = None
        if not more:
            self.complete.set()
        return more

    def _update(self, deadline: float) -> bool:
        if self.store.damaged:
            raise sqlite3.DatabaseError("malformed: found while reading")
        self.names = dict(self._listed())
        if not self._loaded:
            self.files, self._loaded = self.store.load({}), True
        current = {file.name: file.stamp for file in self.files.values()}
        stale = [number for number, file in self.files.items() if file.name not in self.names]
        if stale:
            self.store.delete(stale)
        waiting = [name for name, stamp in self.names.items() if current.get(name) != stamp]
        done = 0
        for name in waiting:
            self.store.write(name, self.names[name], read_file(self.folder, name, self.pause))
            done += 1
            if time.monotonic() > deadline:
                break
        if done or stale:
            self.files = self.store.load(self.files)
        return done < len(waiting)

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
        current = {(file.name, file.stamp) for file in list(self.files.values())}
        names = self.names
        return {"done": sum(item in current for item in names.items()), "total": len(names)}
