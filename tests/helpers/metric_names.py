"""The list of metrics as a reader uses it: which entry describes a metric of a run."""

from __future__ import annotations

import re

from assay.runs.metrics import METRICS

PLACEHOLDER = re.compile(r"NAME|LABEL|N|K")


def meaning(metric: str) -> str | None:
    """What a metric means; None if it is not in the list."""
    listed = {name: text for part in METRICS.values() for name, text in part.items()}
    if metric in listed:
        return listed[metric]
    patterns = ((PLACEHOLDER.sub(lambda m: r"\d+" if m[0] in "NK" else r".+", name), name) for name in listed)
    return next((listed[name] for pattern, name in patterns if re.fullmatch(pattern, metric)), None)
