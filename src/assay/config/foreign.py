"""Names of settings in TRL, verl, OpenRLHF and nanochat, and the keys that correspond to them here.

An unknown key that is one of these names is reported with its equivalent. foreign.csv has the table.
"""

from __future__ import annotations

import csv
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Equivalent(NamedTuple):
    """The key for a setting of another library; empty if there is none. The remark says what differs."""

    library: str
    name: str
    key: str
    remark: str


@cache
def equivalents() -> list[Equivalent]:
    with (Path(__file__).parent / "foreign.csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return [Equivalent(*row) for row in rows]


PRIMARY = ("optim", "train", "sampling")  # sections that are meant if a key of several sections is given without one


def explain_foreign(key: str, known: Collection[str]) -> str | None:
    """Say what an unknown dotted key is called here, or None if it is no setting of another library.

    Parts in front are ignored: a name of another library may be written into any of our sections. So are parts that
    are missing in front, as in `rollout.n`, unless the rest is also the name of one of our keys. An equivalent that
    is not among the `known` keys of the command does not count.
    """
    own = {name.rpartition(".")[2] for name in known}
    parts = key.lower().replace("-", "_").split(".")
    for start in range(len(parts)):
        wanted = ".".join(parts[start:])
        exact = [row for row in equivalents() if row.name == wanted]
        partial = [row for row in equivalents() if row.name.endswith(f".{wanted}") and wanted not in own]
        for row in (exact + partial)[:1]:
            return describe(row, parts[0] if start else "", known)
    return None


def nearest_foreign(key: str) -> str | None:
    """Return the name in another library that is nearly the last part of `key`."""
    names = [row.name for row in equivalents()]
    return next(iter(get_close_matches(key.lower().replace("-", "_").rpartition(".")[2], names, 1, cutoff=0.85)), None)


def describe(equivalent: Equivalent, section: str, known: Collection[str]) -> str | None:
    library, name, key, remark = equivalent
    if not key:
        return f"{library}'s {name} is {remark}"
    first, _, last = key.rpartition(".")
    # In a section with a key of this name, that key is meant: critic.learning_rate is critic.lr.
    given = f"{section}.{last}" if first in PRIMARY else key
    key = next((candidate for candidate in (given, key, f"eval.{last}", last) if candidate in known), "")
    if not key:
        return None
    text = f"did you mean '{key}'?" if name == last else f"{library}'s {name} is '{key}' here"
    return text + (f" ({remark})" if remark else "")
