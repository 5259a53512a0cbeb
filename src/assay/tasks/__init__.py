"""What to solve: GSM8K, MATH, Countdown, generated word problems, and whatever a user brings.

`make_task("gsm8k", path="data/gsm8k")` gives a Task: `task.prompts("train")`, `task.judge()`.
"""

from __future__ import annotations

from assay.tasks.abacus import Abacus
from assay.tasks.base import SPLITS, OverlapReport, Task, check_gold, overlap
from assay.tasks.countdown import Countdown
from assay.tasks.gsm8k import GSM8K
from assay.tasks.jsonl import Jsonl
from assay.tasks.math import Math
from assay.tasks.registry import TASKS, make_task

__all__ = [
    "GSM8K",
    "SPLITS",
    "TASKS",
    "Abacus",
    "Countdown",
    "Jsonl",
    "Math",
    "OverlapReport",
    "Task",
    "check_gold",
    "make_task",
    "overlap",
]
