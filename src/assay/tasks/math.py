"""MATH and MATH-500: competition problems whose solutions end in a \\boxed{} answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from assay.rewards.extract import boxed
from assay.tasks.base import BOXED_INSTRUCTION, state_answer
from assay.tasks.sources import DataRow, HubSource, RowTask, is_prepared, manifest_of, open_source, user_message
from assay.types import Prompt, UserError

TEST_NAME = "HuggingFaceH4/MATH-500"
TRAIN_NAME = "EleutherAI/hendrycks_math"  # the 7,500 training problems; the 500 are from MATH's test split
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
HUB = HubSource({"train": (TRAIN_NAME, SUBJECTS, "train"), "test": (TEST_NAME, (None,), "test")})


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
        super().__init__(open_source(path, HUB, (TEST_NAME, TRAIN_NAME)), val_size, seed)
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
