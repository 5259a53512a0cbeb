"""Bring your own problems: a JSONL file, a folder of them, or rows from a function of yours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from assay.rewards import FunctionJudge, Judge, load_object
from assay.tasks.base import named_judge
from assay.tasks.sources import (
    DataRow,
    ListSource,
    RowTask,
    Source,
    manifest_of,
    open_source,
    prepared_row,
    read_messages,
    user_message,
)
from assay.types import Prompt, UserError, Verdict

QUESTION_COLUMNS = ("messages", "question", "prompt", "problem")
ANSWER_COLUMNS = ("answer", "gold", "target")
RowMap = Callable[[Mapping[str, Any]], "Mapping[str, Any] | Prompt"]


class OwnTask(RowTask):
    """Rows of the user's own.

    `map` turns a raw row into {question or messages, answer, solution?, any other fields}. `judge` is "math",
    "countdown" or the path of a function such as "my_file.py:reward" (see FunctionJudge).
    """

    def __init__(
        self,
        source: Source,
        map: str | RowMap | None = None,
        extract: str | None = None,
        judge: str | Callable[..., Verdict] | None = None,
        instruction: str = "",
        val_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(source, val_size, seed)
        self.instruction = instruction
        self.map_name = map if isinstance(map, str) else getattr(map, "__name__", "map")
        self.map: Any = load_object(map) if isinstance(map, str) else map
        self.default_extract = extract or "boxed"
        self.judge_kind = judge if isinstance(judge, str) and ":" not in judge else "math"
        named_judge(self.judge_kind, self.default_extract)  # an unknown name is an error now, not at the first judging
        self.own_judge: Judge | None = None
        if judge is not None and judge != self.judge_kind:
            self.own_judge = FunctionJudge(judge) if isinstance(judge, str) else judge

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return self.own_judge or super().judge(extract, strict)

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        return self.to_prompt(row, origin)  # prepared rows too: a map may want to change them

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        mapped = self._mapped(row)
        if isinstance(mapped, Prompt):
            return mapped
        row = DataRow(mapped, row.where, row.key)
        asked = row.column(*QUESTION_COLUMNS)
        messages = user_message(asked, self.instruction) if isinstance(asked, str) else read_messages(asked, row.where)
        used = {"id", "solution", *(name for name in (*QUESTION_COLUMNS, "answer", "gold") if name in mapped)}
        answered = self.own_judge is None or any(name in mapped for name in ANSWER_COLUMNS)
        solution = mapped.get("solution")
        return Prompt(
            id=str(mapped.get("id", f"{self.name}/{split}/{row.key}")),
            messages=messages,
            answer=self._answer(row) if answered else "",  # a judge of one's own may need none
            solution=None if solution is None else str(solution),
            fields={name: value for name, value in mapped.items() if name not in used},
        )

    def _answer(self, row: DataRow) -> str:
        """The gold answer; only a judge of the user's own may be given a list or an object as text."""
        return row.text(*ANSWER_COLUMNS) if self.own_judge is None else str(row.column(*ANSWER_COLUMNS))

    def _mapped(self, row: DataRow) -> Mapping[str, Any] | Prompt:
        if self.map is None:
            return row.values
        try:
            mapped = self.map(row.values)
        except Exception as error:  # the user's own code: whatever it raises is for the user to mend
            raise UserError(f"{self.map_name} raised {type(error).__name__} on {row.where}: {error}") from error
        if not isinstance(mapped, (Mapping, Prompt)):
            raise UserError(
                f"{self.map_name} must return a dict or a Prompt, not {type(mapped).__name__} ({row.where})"
            )
        return mapped


class Jsonl(OwnTask):
    """`path`: one JSONL file, or a folder with train.jsonl, test.jsonl and perhaps validation.jsonl."""

    name = "jsonl"

    def __init__(
        self,
        path: str | None = None,
        map: str | RowMap | None = None,
        extract: str | None = None,
        judge: str | Callable[..., Verdict] | None = None,
        instruction: str = "",
        val_size: int | None = None,
        seed: int = 0,
    ) -> None:
        manifest = manifest_of(path)  # prepared files know how they are judged
        if ":" in str(manifest.get("judge", "")):
            raise UserError(f"the manifest of {path} names code to judge with: name it yourself with task.args.judge")
        super().__init__(
            open_source(path),
            map,
            extract or manifest.get("extract"),
            judge or manifest.get("judge"),
            instruction,
            val_size,
            seed,
        )


class RowsTask(OwnTask):
    """Rows or Prompts that a user's module holds: a mapping gives them by split, a list is shared out like a file."""

    def __init__(
        self,
        rows: Any,
        name: str,
        extract: str | None = None,
        judge: str | Callable[..., Verdict] | None = None,
        instruction: str = "",
        val_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.name = name.rpartition(":")[2]
        by_split = (
            {split: rows_of(part) for split, part in rows.items()} if isinstance(rows, Mapping) else rows_of(rows)
        )
        super().__init__(ListSource(by_split, name), None, extract, judge, instruction, val_size, seed)


def rows_of(rows: Iterable[Any]) -> list[Any]:
    return [prepared_row(row, row.question) if isinstance(row, Prompt) else row for row in rows]
