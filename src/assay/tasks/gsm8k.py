"""GSM8K: grade-school word problems, 7,473 to train and 1,319 to test on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from assay.tasks.base import BOXED_INSTRUCTION, state_answer
from assay.tasks.files import Row
from assay.tasks.rows import RowTask, user_message
from assay.tasks.sources import HubSource, open_source
from assay.types import Prompt, UserError

HUB_NAME = "openai/gsm8k"
HUB = HubSource({split: (HUB_NAME, ("main",), split) for split in ("train", "test")})
SOLUTION_STYLES = ("boxed", "hash")


class GSM8K(RowTask):
    """`path`: a folder with train.jsonl and test.jsonl, one JSONL file, or None for the Hugging Face hub."""

    name = "gsm8k"

    def __init__(
        self,
        path: str | None = None,
        instruction: str = BOXED_INSTRUCTION,
        solution_style: str = "boxed",
        annotations: bool = False,
        val_size: int | None = None,
        seed: int = 0,
    ) -> None:
        if solution_style not in SOLUTION_STYLES:
            raise UserError(
                f'gsm8k: solution_style must be one of {", ".join(SOLUTION_STYLES)}, not "{solution_style}"'
            )
        super().__init__(open_source(path, HUB, (HUB_NAME,)), val_size, seed)
        self.instruction = instruction
        self.annotations = annotations  # worked solutions keep GSM8K's <<48/2=24>>, which show how to call a calculator
        self.default_extract = solution_style  # demonstrations and judge must agree on where the answer stands

    def gold(self, row: Mapping[str, Any]) -> str:
        answer = str(row["answer"])
        if "####" not in answer:
            raise UserError(f'gsm8k: an answer must end in "#### N", but this one does not: {answer[-80:]!r}')
        return answer.rpartition("####")[2].strip().replace(",", "")

    def to_prompt(self, row: Row, split: str) -> Prompt:
        question, worked = str(row.column("question")), str(row.column("answer"))
        try:
            answer = self.gold(row.values)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
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
