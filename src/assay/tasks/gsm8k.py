"""GSM8K: grade-school word problems, 7,473 for training and 1,319 for testing."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from assay.tasks.base import BOXED_INSTRUCTION, state_answer
from assay.tasks.sources import (
    MANIFEST,
    DataRow,
    HubSource,
    RowTask,
    is_prepared,
    listed,
    manifest_of,
    open_source,
    user_message,
)
from assay.types import Prompt, UserError

HUB_NAME = "openai/gsm8k"
HUB = HubSource({split: (HUB_NAME, ("main",), split) for split in ("train", "test")})
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
        super().__init__(open_source(path, HUB, (HUB_NAME,)), val_size, seed)
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
