"""Rows as the source of a task: JSONL and Parquet files, folders, datasets of the Hugging Face hub, lists in memory.

RowTask makes one prompt per row, and holds out splits by a seeded shuffle where the source has none.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from functools import partial
from pathlib import Path
from typing import Any

from assay.system.memory import check_data_fits
from assay.tasks.base import ALL, NoSuchSplit, Task, carve_validation, check_split, is_message
from assay.types import Message, Prompt, UserError, missing_extra, plural

MAX_LINE = 256 * 2**20  # characters of one row
CHECKED = 32 * 2**20  # characters between two checks of the free memory


@dataclass(frozen=True, slots=True)
class DataRow:
    """A raw row and its origin, for messages and ids."""

    values: Mapping[str, Any]
    where: str  # e.g. "train.jsonl:17"
    key: str  # stable within its source, e.g. "16"

    def column(self, *names: str, advice: str = "") -> Any:
        """Return the first of these columns that the row has; "a.b" is the field b of the object in column a."""
        for name in names:
            value = column_of(self.values, name)
            if value is not None:
                return value
        raise UserError(
            f"{self.where} has no column {listed(names, ' or ')}; it has {listed(dotted(self.values))}{advice}"
        )

    def text(self, *names: str, advice: str = "") -> str:
        """Return a column as text; a list or an object is a UserError."""
        value = self.column(*names, advice=advice)
        if not is_text_or_number(value):
            columns, kind = listed(names, " or "), value if isinstance(value, float) else type(value).__name__
            raise UserError(f"{self.where}: the column {columns} must be text or a number, not {kind}")
        return str(value)


def is_text_or_number(value: Any) -> bool:
    """Whether a value can be an answer; NaN and infinity stand for missing values."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def column_of(values: Mapping[str, Any], name: str) -> Any:
    """Return a value by its column name or its dotted name; None if there is none."""
    value: Any = values.get(name)
    if value is None and "." in name:
        value = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def dotted(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of all columns; the fields of an object have dotted names."""
    names = []
    for name, value in values.items():
        inner = dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) and not prefix else []
        names += inner or [f"{prefix}{name}"]
    return names


def listed(names: Iterable[str], separator: str = ", ") -> str:
    return separator.join(f'"{name}"' for name in names) or "none"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a text file one after the other, with their numbers."""
    number, unchecked = 0, 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            while line := file.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE:
                    raise UserError(f"{path}:{number} is longer than {MAX_LINE >> 20} MiB: write one row per line")
                unchecked += len(line)
                if unchecked > CHECKED:
                    check_data_fits(path, number)
                    unchecked = 0
                yield number, line
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a file") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{path} is not UTF-8 text (near line {number + 1}): decompress it, or convert it to UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that is one JSON object."""
    return parse_object("".join(line for _, line in read_lines(path)), str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not valid JSON: {error.msg}") from None
    except RecursionError:
        raise UserError(f"{where} is not valid JSON: nested too deeply") from None
    except ValueError:
        raise UserError(f"{where} has an integer of too many digits: write it as a string") from None
    if not isinstance(values, dict):
        raise UserError(f"{where} must be a JSON object, not {type(values).__name__}")
    return values


def read_jsonl(path: str | Path) -> list[DataRow]:
    """Read the rows of a JSONL file; blank lines are skipped, a file without rows is a UserError. Unlike files of runs
    (`assay.runs.files.json_lines`), the data of users must not lose a row: every damaged line is a UserError.
    """
    path = Path(path)
    rows: list[DataRow] = []
    for number, line in read_lines(path):
        if line.strip():
            where = f"{path}:{number}"
            rows.append(DataRow(parse_object(line, where), where, str(len(rows))))
    if not rows:
        raise UserError(f"{path} is empty: it needs at least one line with a JSON object")
    return rows


def read_rows(path: str | Path) -> list[DataRow]:
    """Read the rows of a Parquet file if its name ends in .parquet, else of a JSONL file."""
    return parquet_rows([Path(path)]) if Path(path).suffix.lower() == SUFFIX else read_jsonl(path)


def parquet_rows(files: Sequence[Path]) -> list[DataRow]:
    """Read the rows of all files of a split."""
    located = [(row, f"{file}, row {index}") for file in files for index, row in enumerate(read_parquet(file))]
    if not located:
        raise UserError(f"{files[0]} has no rows")
    return [DataRow(row, where, str(index)) for index, (row, where) in enumerate(located)]


def jsonl_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)  # ASCII escapes preserve lone surrogates


SPLIT_STEMS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
MANIFEST = "manifest.json"  # written with prepared files


@dataclass(frozen=True)
class Source:
    """Rows of a task by split."""

    name: str  # for messages
    read: Callable[[str], list[DataRow] | None]  # returns the rows of a split, or None if the source lacks the split
    whole: bool = False  # it has no splits: `read` returns all rows for every split


def list_source(rows: Any, name: str) -> Source:
    """Rows in memory, as dicts or Prompts: an iterable of them, or a mapping from splits to iterables."""
    whole = not isinstance(rows, Mapping)
    lists = {split: list(part) for split, part in ({ALL: rows} if whole else rows).items()}

    def read(split: str) -> list[DataRow] | None:
        part = lists.get(ALL if whole else split)
        if part is not None and not part:
            raise UserError(f"{name} has no rows")
        return None if part is None else as_data_rows(part, name)

    return Source(name, read, whole)


def as_data_rows(rows: Iterable[Any], name: str) -> list[DataRow]:
    data = []
    for index, row in enumerate(rows):
        values = prepared_row(row, row.question) if isinstance(row, Prompt) else row
        if not isinstance(values, Mapping):
            raise UserError(f"{name} must have dicts or Prompts as rows, but row {index} is {type(row).__name__}")
        data.append(DataRow(values, f"{name}[{index}]", str(index)))
    return data


def read_folder(folder: Path, split: str) -> list[DataRow] | None:
    """Read train.jsonl, validation.jsonl, test.jsonl (or the only test*.jsonl), the Parquet files of a split, or one
    .json file per problem in train/."""
    stems = SPLIT_STEMS[split]
    shards = shards_of(folder, stems)
    text = next((file for stem in stems if (file := folder / f"{stem}.jsonl").is_file()), None)
    if text is not None and shards:
        raise UserError(f"{folder} has both {text.name} and {shards[0].name}: set the path to one of them")
    if text is not None or shards:
        return read_jsonl(text) if text is not None else parquet_rows(shards)
    if tree := next((inner for stem in stems if (inner := folder / stem).is_dir()), None):
        return _read_tree(tree)
    numbered = sorted(folder.glob("test*.jsonl")) if split == "test" else []
    if len(numbered) > 1:
        names = listed(file.name for file in numbered)
        raise UserError(f"{folder} has several test files ({names}): set the path to one of them")
    if split == "validation" and (files := manifest_of(str(folder)).get("files")) and "validation.jsonl" not in files:
        return []  # prepared without validation: the train file is complete
    return read_jsonl(numbered[0]) if numbered else None


def _read_tree(folder: Path) -> list[DataRow]:
    files = sorted(folder.rglob("*.json"), key=lambda file: (file.parent, len(file.stem), file.stem))
    if not files:
        raise UserError(f"{folder} has no .json files")
    keys = [file.relative_to(folder).with_suffix("").as_posix() for file in files]
    return [DataRow(read_object(f), str(f), key) for f, key in zip(files, keys, strict=True)]


def hub_source(parts: Mapping[str, tuple[str, Sequence[str | None], str]]) -> Source:
    """Datasets of the Hugging Face hub: for each split the name of the dataset, its configurations and its split."""

    def read(split: str) -> list[DataRow] | None:
        if split not in parts:
            return None
        dataset, configurations, hub_split = parts[split]
        rows = (row for name in configurations for row in load_hub(dataset, name, hub_split))
        return as_data_rows(rows, f"{dataset} {hub_split}")

    return Source(" + ".join(sorted({dataset for dataset, _, _ in parts.values()})), read)


def load_hub(dataset: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
    advice = "or give path=FOLDER with train.jsonl and test.jsonl"
    try:
        import datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise missing_extra(f'reading "{dataset}" from the Hugging Face hub', "hub", advice) from None
    try:
        return list(datasets.load_dataset(dataset, configuration, split=split))
    except Exception as error:  # many types from several packages, if the hub cannot be reached
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f'cannot read "{dataset}" from the Hugging Face hub ({reason}): check the network, {advice}'
        ) from error


def open_source(path: str | None, hub: Source | None = None, hub_names: Sequence[str] = ()) -> Source:
    """Open a local folder or file; or the hub, if the path is None or the name of the hub's dataset."""
    if path is not None and Path(path).is_dir():
        return Source(str(Path(path)), partial(read_folder, Path(path)))
    if path is not None and Path(path).is_file():
        return Source(str(Path(path)), lambda split: read_rows(path), whole=True)
    if hub is not None and (path is None or path in hub_names):
        return hub
    problem = "this task needs a path" if path is None else f"there is no file or folder {path}"
    raise UserError(f"{problem}: give a JSONL or Parquet file, or a folder with train.jsonl and test.jsonl")


def manifest_of(path: str | None) -> dict[str, Any]:
    """Return the manifest of a prepared folder, or of a file that it lists; else an empty dict."""
    if path is None:
        return {}
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = read_object(folder / MANIFEST)
    prepared = folder == Path(path) or Path(path).name in manifest.get("files", {})
    return manifest if prepared else {}


DEFAULT_VALIDATION = 500
PREPARED_COLUMNS = ("id", "question", "messages", "answer", "solution")


class RowTask(Task):
    """A task with one prompt per row. A single file or list is split into train, validation and test."""

    def __init__(self, source: Source, val_size: int | None = None, seed: int = 0, instruction: str = "") -> None:
        self.source, self.has_all, self.instruction = source, source.whole, instruction
        self.val_size = val_size  # None: 500, or a tenth of fewer than 5,000 rows
        self.seed = seed
        self._cache: dict[str, list[Prompt]] = {}

    @abstractmethod
    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        """Convert a raw row to a prompt."""

    def gold_of(self, row: DataRow) -> str:
        """Return the gold answer of a row; errors name the row."""
        try:
            return self.gold(row.values)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split != ALL:
            check_split(split)
        if split not in self._cache:
            self._cache[split] = [self._convert(row, origin) for row, origin in self._rows(split)]
        if not self._cache[split]:
            raise NoSuchSplit(
                f"{self.source.name} has no {split} problems: set task.args.val_size, or add a file for the split"
            )
        return self._cache[split]

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        return prepared_prompt(row) if is_prepared(row) else self.to_prompt(row, origin)

    def _rows(self, split: str) -> list[tuple[DataRow, str]]:
        """Return rows of a split, each with the name of its split in the source, which is part of its id."""
        if self.source.whole:
            return [(row, ALL) for row in self._part_of_whole(split)]
        if split == ALL:
            raise NoSuchSplit(f"{self.source.name} consists of splits: name one of them, or set the path to one file")
        rows = self.source.read(split)
        if split == "test" or (split == "validation" and rows is not None):
            return [(row, split) for row in self._present(rows, split)]
        pool = self._present(rows if split == "train" else self.source.read("train"), split)
        size = 0 if self.source.read("validation") is not None else self._held_out(len(pool))
        return [(row, "train") for row in self._carved(pool, size)[split == "validation"]]

    def _part_of_whole(self, split: str) -> list[DataRow]:
        """Return the part of a source without splits: first test, then validation of the rest, then train."""
        rows = self._present(self.source.read(ALL), split)
        if split == ALL:
            return rows
        size = self._held_out(len(rows))
        if size and 2 * size >= len(rows):
            raise UserError(
                f"{self.source.name} has {plural(len(rows), 'row')}, too few for {size} each of test and validation: "
                f"set task.args.val_size between 0 and {max((len(rows) - 1) // 2, 0)}"
            )
        rest, test = self._carved(rows, size)
        return test if split == "test" else self._carved(rest, size)[split == "validation"]

    def _carved(self, rows: list[DataRow], size: int) -> tuple[list[DataRow], list[DataRow]]:
        rest, held_out = carve_validation(len(rows), size, self.seed)
        return [rows[index] for index in rest], [rows[index] for index in held_out]

    def _held_out(self, count: int) -> int:
        return min(DEFAULT_VALIDATION, count // 10) if self.val_size is None else self.val_size

    def _present(self, rows: list[DataRow] | None, split: str) -> list[DataRow]:
        if rows is None:
            raise NoSuchSplit(
                f"{self.source.name} has no {split} split: add {split}.jsonl, or set the path to one file"
            )
        return rows


def is_prepared(row: DataRow) -> bool:
    return "messages" in row.values and "id" in row.values


def prepared_prompt(row: DataRow) -> Prompt:
    """Convert a row that `assay data prepare` wrote."""
    values = row.values
    return Prompt(
        id=str(values["id"]),
        messages=read_messages(values["messages"], row.where),
        answer=str(values.get("answer", "")),
        solution=values.get("solution"),
        fields={name: value for name, value in values.items() if name not in PREPARED_COLUMNS},
    )


def prepared_row(prompt: Prompt, question: str) -> dict[str, Any]:
    """Return the row that `assay data prepare` writes for a prompt."""
    reserved = [name for name in PREPARED_COLUMNS if name in prompt.fields]
    if reserved:
        raise UserError(f"the fields of {prompt.id} use the reserved names {listed(reserved)}: rename them")
    row = {"id": prompt.id, "question": question, "messages": list(prompt.messages), "answer": prompt.answer}
    if prompt.solution is not None:
        row["solution"] = prompt.solution
    return {**row, **prompt.fields}


def read_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f'{where}: "messages" must be a list of {{"role", "content"}} objects')
    if not all(map(is_message, value)):
        raise UserError(f'{where}: each message needs a "role" and a "content", both text')
    return tuple(Message(role=message["role"], content=message["content"]) for message in value)


def row_messages(row: DataRow, question: str, instruction: str) -> tuple[Message, ...]:
    """Return the messages of a row; without any, the question as the user's message."""
    messages = row.values.get("messages")
    return read_messages(messages, row.where) if messages else user_message(question, instruction)


def user_message(question: str, instruction: str = "") -> tuple[Message, ...]:
    content = f"{question}\n{instruction}" if instruction else question
    return (Message(role="user", content=content),)


# Parquet files: single files, and the shards that `datasets` writes. pyarrow is imported only here.

SUFFIX = ".parquet"
TEXT_TYPES = ("string", "large_string", "binary", "large_binary")
ROW_BYTES, VALUE_BYTES = 300, 8  # memory of a row and its origin, and of each value: at least
BATCH_ROWS, BATCH_BYTES = 1_000, 64 * 2**20  # decoded at a time: at most
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)")


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file as plain Python values; binary values that are not text are left out."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra(f"reading {path}", "parquet", "or convert it to JSONL") from None
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file")
    if not path.exists():
        raise UserError(f"there is no file {path}")
    rows: list[dict[str, Any]] = []
    try:
        # A dictionary has equal texts only once. So a small file with one long text in each row stays small.
        texts = [field.name for field in pyarrow.parquet.read_schema(path) if str(field.type) in TEXT_TYPES]
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            check_data_fits(path, file.metadata.num_rows, least_memory(file.metadata))
            for batch in file.iter_batches(batch_rows(file.metadata)):
                rows += batch_values(batch)
                check_data_fits(path, len(rows))
    except MemoryError:
        raise UserError(f"{path} does not fit into memory: use fewer rows or more memory") from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{path} is not a readable Parquet file: {reason}") from None
    return rows


def least_memory(metadata: Any) -> int:
    """Bytes that the rows of a file need at least, as its footer says."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    values = sum(group.column(number).num_values for group in groups for number in range(group.num_columns))
    return ROW_BYTES * metadata.num_rows + VALUE_BYTES * values


def batch_rows(metadata: Any) -> int:
    """Number of rows to decode at a time."""
    size = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return min(max(BATCH_BYTES * metadata.num_rows // max(size, 1), 1), BATCH_ROWS)


def batch_values(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch; equal texts of a column are the same object."""
    names = batch.schema.names
    rows = zip(*map(column_values, batch.columns), strict=True)
    return [
        {name: value for name, value in zip(names, row, strict=True) if not isinstance(value, bytes)} for row in rows
    ]


def column_values(column: Any) -> list[Any]:
    """Return the plain values of a column; binary values stay bytes."""
    if not hasattr(column, "dictionary"):
        return [plain_value(value) for value in column.to_pylist()]
    used = column.indices.unique().drop_null()
    values = map(plain_value, column.dictionary.take(used).to_pylist())
    by_index = dict(zip(used.to_pylist(), values, strict=True))
    return [by_index.get(index) for index in column.indices.to_pylist()]


def shards_of(folder: Path, stems: Sequence[str]) -> list[Path]:
    """Return the Parquet files of a split: STEM.parquet, STEM-00000-of-00002.parquet and the like, or STEM/*.parquet.

    They may also be in the subfolder data, as in many datasets of the Hugging Face hub.
    """
    for parent in (folder, folder / "data"):
        for stem in stems:
            if (single := parent / f"{stem}{SUFFIX}").is_file():
                return [single]
            if shards := sorted(parent.glob(f"{stem}-*-of-*{SUFFIX}")):
                return _complete(shards, stem)
            if inside := sorted((parent / stem).glob(f"*{SUFFIX}")):
                return inside
    return []


def _complete(shards: Sequence[Path], stem: str) -> list[Path]:
    """Return the shards of one split, in order; raise a UserError if some are missing."""
    matches = [(match, path) for path in shards if (match := _SHARD.fullmatch(path.stem)) and match["stem"] == stem]
    counts = {int(match["count"]) for match, _ in matches}
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise UserError(
            f"{shards[0].parent} has {stem} files of {numbers} shards: keep only those that belong together"
        )
    by_number = {int(match["number"]): path for match, path in matches}
    count = counts.pop() if counts else 0
    if missing := [number for number in range(count) if number not in by_number]:
        raise UserError(
            f"{shards[0].parent} has only {plural(len(by_number), 'shard')} of {count} of {stem}: "
            f"number {missing[0]} is missing"
        )
    return [by_number[number] for number in sorted(by_number)]


def plain_value(value: Any) -> Any:
    """Return a value that JSON can express: dates, decimal numbers and the like become text.

    Bytes that are not text stay bytes. They are left out of rows and objects; in a list they become text.
    """
    if isinstance(value, Mapping):
        fields = ((str(name), plain_value(field)) for name, field in value.items())
        return {name: field for name, field in fields if not isinstance(field, bytes)}
    if isinstance(value, list | tuple):
        items = map(plain_value, value)
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float | None) else str(value)
