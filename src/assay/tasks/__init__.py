"""Tasks: GSM8K, MATH, Countdown, generated word problems, programs with tests, reasoning-gym, and users' own data.

`make_task("gsm8k", path="data/gsm8k")` returns a Task with `prompts("train")` and `judge()`.
"""

from __future__ import annotations

from assay.tasks.abacus import Abacus
from assay.tasks.base import SPLITS, Task, check_gold, overlap
from assay.tasks.code import Code
from assay.tasks.countdown import Countdown
from assay.tasks.datasets import GSM8K, Jsonl, Math
from assay.tasks.registry import TASKS, make_task

__all__ = [
    "GSM8K",
    "SPLITS",
    "TASKS",
    "Abacus",
    "Code",
    "Countdown",
    "Jsonl",
    "Math",
    "Task",
    "check_gold",
    "make_task",
    "overlap",
]
