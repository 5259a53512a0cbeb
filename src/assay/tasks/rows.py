"""Tasks read from rows: one prompt a row, and held-out splits carved by a seeded shuffle where the source has none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from assay.tasks.base import ALL, NoSuchSplit, Task, carve_validation, check_split
from assay.tasks.files import DataRow, listed
from assay.tasks.sources import Source
from assay.types import Message, Prompt, UserError

DEFAULT_VALIDATION = 500
PREPARED_COLUMNS = ("id", "question", "messages", "answer", "solution")


class RowTask(Task):
    """A single file or list is shared out between train, validation and test; "all" is the whole of it."""

    def __init__(self, source: Source, val_size: int | None = None, seed: int = 0) -> None:
        self.source, self.has_all = source, source.whole
        self.val_size = val_size  # None: 500, or a tenth of a source that holds fewer than 5,000 rows
        self.seed = seed
        self._cache: dict[str, list[Prompt]] = {}

    @abstractmethod
    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        """The prompt of one raw row."""

    def prompts(self, split: str) -> Sequence[Prompt]:
        if split != ALL:
            check_split(split)
        if split not in self._cache:
            self._cache[split] = [self._convert(row, origin) for row, origin in self._rows(split)]
        if not self._cache[split]:
            raise NoSuchSplit(
                f"{self.source.describe()} gives no {split} problems: set val_size, or add a file for the split"
            )
        return self._cache[split]

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        return prepared_prompt(row) if is_prepared(row) else self.to_prompt(row, origin)

    def _rows(self, split: str) -> list[tuple[DataRow, str]]:
        """Rows of a split with the name of the split that the source keeps them in, which their ids carry."""
        if self.source.whole:
            return [(row, ALL) for row in self._share(split)]
        if split == ALL:
            raise NoSuchSplit(f"{self.source.describe()} is made of splits: name one of them, or one file as the path")
        given = self.source.read(split)
        if split == "test" or (split == "validation" and given is not None):
            return [(row, split) for row in self._present(given, split)]
        pool = self._present(given if split == "train" else self.source.read("train"), split)
        if split == "train" and self.source.read("validation") is not None:
            return [(row, split) for row in pool]
        train, validation = carve_validation(len(pool), self._held_out(len(pool)), self.seed)
        return [(pool[index], "train") for index in (train if split == "train" else validation)]

    def _share(self, split: str) -> list[DataRow]:
        """What a split gets of a source that knows none: first test, then validation of the rest, then train."""
        rows = self._present(self.source.read(ALL), split)
        if split == ALL:
            return rows
        size = self._held_out(len(rows))
        if size and 2 * size >= len(rows):
            raise UserError(
                f"{self.source.describe()} has {len(rows)} rows, too few for {size} each of test and validation: "
                f"set val_size between 0 and {max((len(rows) - 1) // 2, 0)}"
            )
        rest, test = carve_validation(len(rows), size, self.seed)
        if split == "test":
            return [rows[index] for index in test]
        train, validation = carve_validation(len(rest), size, self.seed)
        return [rows[rest[index]] for index in (train if split == "train" else validation)]

    def _held_out(self, count: int) -> int:
        return min(DEFAULT_VALIDATION, count // 10) if self.val_size is None else self.val_size

    def _present(self, rows: list[DataRow] | None, split: str) -> list[DataRow]:
        if rows is None:
            raise NoSuchSplit(
                f"{self.source.describe()} has no {split} split: add {split}.jsonl, or name one file as the path"
            )
        return rows


def is_prepared(row: DataRow) -> bool:
    return "messages" in row.values and "id" in row.values


def prepared_prompt(row: DataRow) -> Prompt:
    """A row as `assay data prepare` writes it."""
    values = row.values
    return Prompt(
        id=str(values["id"]),
        messages=read_messages(values["messages"], row.where),
        answer=str(values.get("answer", "")),
        solution=values.get("solution"),
        fields={name: value for name, value in values.items() if name not in PREPARED_COLUMNS},
    )


def prepared_row(prompt: Prompt, question: str) -> dict[str, Any]:
    """What `assay data prepare` writes for a prompt."""
    clash = [name for name in PREPARED_COLUMNS if name in prompt.fields]
    if clash:
        raise UserError(f"the fields of {prompt.id} use the reserved names {listed(clash)}: rename them")
    row = {"id": prompt.id, "question": question, "messages": list(prompt.messages), "answer": prompt.answer}
    if prompt.solution is not None:
        row["solution"] = prompt.solution
    return {**row, **prompt.fields}


def read_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f'{where}: "messages" must be a list of {{"role", "content"}} objects')
    for message in value:
        well_formed = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not well_formed or not isinstance(message.get("content"), str):
            raise UserError(f'{where}: each message needs a "role" and a "content", both text')
    return tuple(Message(role=message["role"], content=message["content"]) for message in value)


def user_message(question: str, instruction: str = "") -> tuple[Message, ...]:
    content = f"{question}\n{instruction}" if instruction else question
    return (Message(role="user", content=content),)
