"""Users' data as a task: a JSONL or Parquet file, a folder of them, or rows from a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from assay.rewards import FunctionJudge, Judge, load_object
from assay.tasks.base import named_judge
from assay.tasks.sources import (
    DataRow,
    RowTask,
    Source,
    column_of,
    list_source,
    manifest_of,
    open_source,
    read_messages,
    user_message,
)
from assay.types import Prompt, UserError, Verdict

QUESTION_COLUMNS = ("messages", "question", "prompt", "problem")
ANSWER_COLUMNS = ("answer", "gold", "target", "reward_model.ground_truth")  # the last one is verl's
RowMap = Callable[[Mapping[str, Any]], "Mapping[str, Any] | Prompt"]


class Jsonl(RowTask):
    """Rows of a user's data. `path`: one JSONL or Parquet file, or a folder with train.jsonl, test.jsonl and optionally
    validation.jsonl (or .parquet).

    `question_column`, `answer_column` and `solution_column` name columns ("a.b": a field of an object). `map` converts
    a raw row to {question or messages, answer, optional solution, any other fields}. `judge` is "math", "countdown",
    "code" or the path of a function such as "my_file.py:reward" (see FunctionJudge).
    """

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
        question_column: str = "",
        answer_column: str = "",
        solution_column: str = "solution",
    ) -> None:
        manifest = manifest_of(path)  # of prepared files, which says how they are judged
        if ":" in str(manifest.get("judge", "")):
            raise UserError(f"the manifest of {path} names code as judge: to use it, set task.args.judge")
        super().__init__(self._open(path), val_size, seed)
        self.instruction = instruction
        self.question_columns = (question_column,) if question_column else QUESTION_COLUMNS
        self.answer_columns = (answer_column,) if answer_column else ANSWER_COLUMNS
        self.solution_column = solution_column
        self.map_name = map if isinstance(map, str) else getattr(map, "__name__", "map")
        self.map: Any = load_object(map) if isinstance(map, str) else map
        judge = judge or manifest.get("judge")
        self.default_extract = extract or manifest.get("extract") or ("code-block" if judge == "code" else "boxed")
        self.judge_kind = judge if isinstance(judge, str) and ":" not in judge else "math"
        named_judge(self.judge_kind, self.default_extract)  # raises if the name is unknown
        self.user_judge: Judge | None = None
        if judge is not None and judge != self.judge_kind:
            self.user_judge = FunctionJudge(judge) if isinstance(judge, str) else judge

    def _open(self, path: str | None) -> Source:
        return open_source(path)

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return self.user_judge or super().judge(extract, strict)

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        return self.to_prompt(row, origin)  # also for prepared rows: `map` may change them

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        mapped = self._mapped(row)
        if isinstance(mapped, Prompt):
            return mapped
        row = DataRow(mapped, row.where, row.key)
        question = row.column(*self.question_columns)
        is_text = isinstance(question, str)
        messages = user_message(question, self.instruction) if is_text else read_messages(question, row.where)
        solution = self._solution(row)
        used = {"id", self.solution_column, *self.question_columns, *self.answer_columns} - {"target"}
        return Prompt(
            id=str(mapped.get("id", f"{self.name}/{split}/{row.key}")),
            messages=messages,
            answer=self._answer(row),
            solution=None if solution is None else str(solution),
            fields={name: value for name, value in mapped.items() if name not in used},
        )

    def _solution(self, row: DataRow) -> Any:
        if self.solution_column != "solution":
            return row.column(self.solution_column)  # raises if a column was named that does not exist
        return row.values.get("solution")

    def _answer(self, row: DataRow) -> str:
        """Return the gold answer as text. Only for a user's judge, it may be a list or an object, or missing."""
        if self.user_judge is None:
            return row.text(*self.answer_columns)
        named = self.answer_columns is not ANSWER_COLUMNS
        known = named or any(column_of(row.values, name) is not None for name in self.answer_columns)
        return str(row.column(*self.answer_columns)) if known else ""

    def _mapped(self, row: DataRow) -> Mapping[str, Any] | Prompt:
        if self.map is None:
            return row.values
        try:
            mapped = self.map(row.values)
        except Exception as error:  # user code
            raise UserError(f"{self.map_name} raised {type(error).__name__} on {row.where}: {error}") from error
        if not isinstance(mapped, (Mapping, Prompt)):
            raise UserError(
                f"{self.map_name} must return a dict or a Prompt, not {type(mapped).__name__} ({row.where})"
            )
        return mapped


class ListTask(Jsonl):
    """Rows or Prompts in a user's module: a mapping from splits to lists, or a list, which is split like a file."""

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
        self.rows, self.path, self.name = rows, name, name.rpartition(":")[2]
        super().__init__(None, None, extract, judge, instruction, val_size, seed)

    def _open(self, path: str | None) -> Source:
        return list_source(self.rows, self.path)
