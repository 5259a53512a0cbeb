"""The list of metrics in the documentation as a reader uses it: which entry describes a metric of a run."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"
METRICS = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
PLACEHOLDER = re.compile(r"NAME|LABEL|N|K")


def meaning(metric: str) -> str | None:
    """What a metric means; None if it is not in the list."""
    if metric in METRICS:
        return METRICS[metric]
    patterns = ((PLACEHOLDER.sub(lambda m: r"\d+" if m[0] in "NK" else r".+", name), name) for name in METRICS)
    return next((METRICS[name] for pattern, name in patterns if re.fullmatch(pattern, metric)), None)
