"""Datasets as tasks: GSM8K, MATH with MATH-500, the generated datasets of reasoning-gym, and users' own rows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from assay.rewards import FunctionJudge, Judge, load_object
from assay.rewards.verifiers import INDEX, SEED, SIZE, ReasoningGymJudge, boxed, dataset, entry
from assay.tasks.base import BOXED_INSTRUCTION, SPLITS, GeneratedTask, named_judge, stable_hash, state_answer
from assay.tasks.sources import (
    MANIFEST,
    DataRow,
    RowTask,
    Source,
    column_of,
    hub_source,
    is_prepared,
    list_source,
    listed,
    manifest_of,
    open_source,
    read_messages,
    user_message,
)
from assay.types import Prompt, UserError, Verdict

GSM8K_NAME = "openai/gsm8k"
GSM8K_HUB = hub_source({split: (GSM8K_NAME, ("main",), split) for split in ("train", "test")})
SOLUTION_STYLES = ("boxed", "hash")
WORDING = {"instruction": BOXED_INSTRUCTION, "solution_style": "boxed", "annotations": False}  # defaults


class GSM8K(RowTask):
    """`path`: a folder with train.jsonl and test.jsonl, one JSONL file, or None for the Hugging Face hub.

    For prepared files, arguments that are None have the values with which the files were prepared.
    """

    name = "gsm8k"

    def __init__(
        self,
        path: str | None = None,
        instruction: str | None = None,
        solution_style: str | None = None,
        annotations: bool | None = None,
        val_size: int | None = None,
        seed: int = 0,
    ) -> None:
        given = {"instruction": instruction, "solution_style": solution_style, "annotations": annotations}
        self.given = {name: value for name, value in given.items() if value is not None}
        if solution_style not in (None, *SOLUTION_STYLES):
            raise UserError(
                f'gsm8k: solution_style must be one of {", ".join(SOLUTION_STYLES)}, not "{solution_style}"'
            )
        super().__init__(open_source(path, GSM8K_HUB, (GSM8K_NAME,)), val_size, seed)
        self.manifest = manifest_of(path)
        known = "extract" in self.manifest
        wording = {**WORDING, **(prepared_wording(path, self.manifest, self.given) if known else self.given)}
        self.instruction = wording["instruction"]
        self.annotations = wording["annotations"]  # solutions keep GSM8K's <<48/2=24>>, the calls of a calculator
        self.default_extract = wording["solution_style"]  # solutions and judge must use the same answer form

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        if self.given and not self.manifest and is_prepared(row):
            raise UserError(
                f"{row.where} was prepared, but without its {MANIFEST} it is unknown with which {listed(self.given)}: "
                "put that file beside it, or remove these settings"
            )
        return super()._convert(row, origin)

    def gold(self, row: Mapping[str, Any]) -> str:
        answer = row["answer"]
        if not isinstance(answer, str):
            raise UserError(f'gsm8k: "answer" must be text that ends in "#### N", not {type(answer).__name__}')
        if "####" not in answer:
            raise UserError(f'gsm8k: an answer must end in "#### N", not in {answer[-80:]!r}')
        return answer.rpartition("####")[2].strip().replace(",", "")

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        question, worked = row.text("question"), row.column("answer")
        answer = self.gold_of(row)
        return Prompt(
            id=f"gsm8k/{split}/{row.key}",
            messages=user_message(question, self.instruction),
            answer=answer,
            solution=self._solution(worked, answer),
        )

    def _solution(self, worked: str, answer: str) -> str:
        rationale = worked.rpartition("####")[0].strip()
        if not self.annotations:
            rationale = re.sub(r"<<[^<>]*>>", "", rationale)
        stated = state_answer(answer, self.default_extract)
        return f"{rationale}\n" + (stated if self.default_extract == "hash" else f"The final answer is {stated}.")


def prepared_wording(path: str | None, manifest: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of prepared files; raise a UserError if other ones are given."""
    prepared = {**WORDING, **manifest.get("args", {}), "solution_style": manifest["extract"]}
    for name, value in given.items():
        if value != prepared[name]:
            again = f"{name}={value if isinstance(value, str) else json.dumps(value)}"
            raise UserError(
                f"{path} was prepared with {name} = {prepared[name]!r}, not {value!r}: remove {name}, "
                f"or prepare it again with --arg {shlex.quote(again)}"
            )
    return {name: prepared[name] for name in WORDING}


MATH_TEST_NAME = "HuggingFaceH4/MATH-500"
MATH_TRAIN_NAME = "EleutherAI/hendrycks_math"  # the 7,500 training problems; the 500 are from MATH's test split
MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
MATH_HUB = hub_source({"train": (MATH_TRAIN_NAME, MATH_SUBJECTS, "train"), "test": (MATH_TEST_NAME, (None,), "test")})


class Math(RowTask):
    """`path`: a folder with train.jsonl and test.jsonl, or with the original train/SUBJECT/N.json files; one JSONL
    file; or None for the Hugging Face hub (MATH for training, MATH-500 for testing)."""

    name = "math"

    def __init__(
        self,
        path: str | None = None,
        instruction: str | None = None,
        val_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(open_source(path, MATH_HUB, (MATH_TEST_NAME, MATH_TRAIN_NAME)), val_size, seed)
        self.given_instruction = instruction
        prepared_with = manifest_of(path).get("args", {}).get("instruction", BOXED_INSTRUCTION)
        self.instruction = prepared_with if instruction is None else instruction

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        """A prepared row has its own instruction, which a given one replaces."""
        prompt = super()._convert(row, origin)
        if self.given_instruction is None or not is_prepared(row):
            return prompt
        return replace(prompt, messages=user_message(row.text("question"), self.given_instruction))

    def gold(self, row: Mapping[str, Any]) -> str:
        """Return the column `answer` (as in MATH-500), or the last \\boxed{} of the solution."""
        answer = row.get("answer")
        if isinstance(answer, list | dict):
            raise UserError(f'math: "answer" must be text or a number, not {type(answer).__name__}')
        if answer is not None:
            return str(answer)
        extraction = boxed(str(row.get("solution", "")))
        if not extraction.found:
            raise UserError("math: a row needs an answer, or a solution with a closed \\boxed{}")
        return extraction.text

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        problem = row.text("problem", "question")
        solution = row.values.get("solution")
        subject = row.values.get("subject", row.values.get("type"))
        details = {"level": row.values.get("level"), "subject": subject}
        return Prompt(
            id=f"math/{split}/{row.values.get('unique_id', row.key)}",
            messages=user_message(problem, self.instruction),
            answer=self.gold_of(row),
            solution=None if solution is None else str(solution),
            fields={name: value for name, value in details.items() if value is not None},
        )

    def gold_completion(self, prompt: Prompt) -> str:
        if prompt.solution is not None and boxed(prompt.solution).found:
            return prompt.solution
        return state_answer(prompt.answer, self.default_extract)


PREFIX = "reasoning_gym:"
INSTRUCTION = "Think first, then put nothing but the final answer inside <answer> </answer> tags."
# Most datasets generate problem i from `seed + i`, so that neighbouring seeds share most problems. Therefore every
# split of every seed has its own range of dataset seeds, below 2**31: MAX_SIZE problems, each drawn up to MAX_TRIES
# times.
MAX_SIZE, MAX_TRIES, SEEDS = 2**16, 2**7, 2**6


class ReasoningGym(GeneratedTask):
    default_extract = "answer-tag"

    def __init__(
        self,
        dataset_name: str,
        seed: int = 0,
        size: int = 10_000,
        eval_size: int = 500,
        instruction: str = INSTRUCTION,
        **options: Any,
    ) -> None:
        """`size` of train, `eval_size` of validation and test each; `options` are passed to the dataset."""
        self.dataset_name, self.name = dataset_name, PREFIX + dataset_name
        if not 0 <= seed < SEEDS:
            raise UserError(f"{self.name}: seed must be from 0 to {SEEDS - 1}, not {seed}")
        for key, value in (("size", size), ("eval_size", eval_size)):
            if not 1 <= value <= MAX_SIZE:
                raise UserError(f"{self.name}: {key} must be from 1 to {MAX_SIZE:,}, not {value}")
        self.seed, self.train_size, self.eval_size, self.instruction = seed, size, eval_size, instruction
        self.options = json.dumps(options, sort_keys=True)
        dataset(dataset_name, self.options, 0, 1)  # raises if the arguments are invalid

    def problem(self, split: str, index: int) -> Prompt:
        """Generate a problem; draw again until its text belongs to the split, so that splits are disjoint."""
        size = self.size(split)
        first = (4 * self.seed + SPLITS.index(split)) * MAX_SIZE * MAX_TRIES
        for seed in range(first, first + size * MAX_TRIES, size):
            problem = entry(self.dataset_name, self.options, seed, size, index)
            if split_by_words(problem["question"]) == split:
                return Prompt(
                    id=f"{self.name}/{split}/{index}",
                    messages=user_message(problem["question"], self.instruction),
                    answer="" if problem["answer"] is None else str(problem["answer"]),
                    fields={SEED: seed, SIZE: size, INDEX: index},
                )
        raise UserError(
            f"{self.name} has too few different problems for a {split} split: choose arguments that allow more"
        )

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return ReasoningGymJudge(extract or self.default_extract, strict, self.dataset_name, self.options)


def split_by_words(question: str) -> str:
    """Return the split of a problem: a quarter each for test and validation, because rejected problems cost time."""
    words = " ".join(question.casefold().split())
    return {0: "test", 1: "validation"}.get(stable_hash(words) % 4, "train")


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
        super().__init__(self._open(path), val_size, seed, instruction)
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
        read = [
            next((name for name in names if column_of(row.values, name) is not None), "")
            for names in (self.question_columns, self.answer_columns)
        ]
        used = {"id", "question", "messages", self.solution_column, *read} - {"target"}
        named = mapped.get("id")
        return Prompt(
            id=f"{self.name}/{split}/{row.key}" if named is None else str(named),
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
            return row.text(*self.answer_columns, advice=": if your reward needs no answer, write an empty one")
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
