"""Tasks: GSM8K, MATH, Countdown, generated word problems, programs with tests, reasoning-gym, and users' own data.

`make_task("gsm8k", path="data/gsm8k")` returns a Task with `prompts("train")` and `judge()`.
"""

from __future__ import annotations

from assay.tasks.abacus import Abacus
from assay.tasks.base import SPLITS, Task, check_gold, overlap
from assay.tasks.registry import make_task

__all__ = ["SPLITS", "Abacus", "Task", "check_gold", "make_task", "overlap"]
