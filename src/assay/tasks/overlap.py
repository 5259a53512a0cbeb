"""Do training and evaluation share problems? Compared by normalised text, and by a sample where a split has no end."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from assay.tasks.base import LazyPrompts
from assay.types import Prompt

LIST_LIMIT = 200_000  # how many prompts are looked at
LAZY_LIMIT = 2_000  # the same, where each has to be made first
N_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class OverlapReport:
    n_train_checked: int
    n_eval: int  # evaluation prompts checked
    n_shared: int  # of these, how many also stand in train
    examples: tuple[tuple[str, str], ...]  # ids (evaluation, train) of the first few
    sampled: bool  # whether either side was too long to be read whole

    def __str__(self) -> str:
        part = " (a sample: the split is longer than that)" if self.sampled else ""
        shared = f"{self.n_shared} of {self.n_eval} evaluation prompts"
        return f"{shared} also stand in {self.n_train_checked} train prompts{part}"


def overlap(train: Sequence[Prompt], evaluation: Sequence[Prompt], limit: int | None = None) -> OverlapReport:
    """Evaluation prompts whose text, but for case and whitespace, is that of a train prompt.

    `limit` bounds how many of each side are looked at.
    """
    train_checked, eval_checked = _sample(train, limit), _sample(evaluation, limit)
    train_ids: dict[bytes, str] = {}
    for prompt in train_checked:
        train_ids.setdefault(fingerprint(prompt), prompt.id)
    shared = [(prompt.id, train_ids[key]) for prompt in eval_checked if (key := fingerprint(prompt)) in train_ids]
    sampled = len(train_checked) < len(train) or len(eval_checked) < len(evaluation)
    return OverlapReport(len(train_checked), len(eval_checked), len(shared), tuple(shared[:N_EXAMPLES]), sampled)


def fingerprint(prompt: Prompt) -> bytes:
    text = " ".join(message["content"] for message in prompt.messages if message["role"] == "user")
    # Episodes of an environment may begin with the same words and go on differently, as their seeds say.
    normalised = " ".join([*text.casefold().split(), str(prompt.fields.get("episode_seed", ""))])
    return hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _sample(prompts: Sequence[Prompt], limit: int | None) -> Sequence[Prompt]:
    """All of them, or the first half of `limit` (what a run reads first) and a seeded draw from the rest."""
    if limit is None:
        limit = LAZY_LIMIT if isinstance(prompts, LazyPrompts) else LIST_LIMIT
    if len(prompts) <= limit:
        return prompts
    head = limit // 2
    drawn = random.Random(0).sample(range(head, len(prompts)), limit - head)
    return [prompts[index] for index in (*range(head), *drawn)]
