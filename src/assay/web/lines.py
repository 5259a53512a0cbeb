"""Lines of rollout files and their arrays, in the form in which the page shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.web.folder import finite_number
from assay.web.index import IndexedFile, arrays_name, integer, reason_of


def problem_of_arrays(file: IndexedFile, error: BaseException) -> str:
    """Why there are no tokens: as found when the file was indexed, or now."""
    about = [problem for problem in file.problems if ".npz" in problem]
    if about:
        return about[0]
    name = arrays_name(file.name)
    missing = isinstance(error, FileNotFoundError)
    return f"{name} is missing: its tokens cannot be shown" if missing else reason_of(name, error)


def skip_reason(document: Mapping[str, Any]) -> str:
    """Why updates with a batch were skipped, from the file next to the batch."""
    updates = [update for update in document.get("updates") or () if isinstance(update, dict)]
    if not updates:
        return "its update was skipped"
    first, count = updates[0], f"{len(updates)} updates were" if len(updates) > 1 else "an update was"
    if isinstance(first.get("weights"), list) and first["weights"]:
        what = f"the weight {first['weights'][0]}"
    else:
        what = "the loss" if finite_number(first.get("loss")) is None else "the gradient"
    return f"{count} skipped, because {what} is not finite"


def context_spans(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Begin and end of the context of each turn, in tokens of the rollout."""
    spans, at = [], 0
    for turn in line.get("turns") or []:
        context, written = integer(turn.get("context_tokens")), integer(turn.get("tokens"))
        spans.append((at, at + context))
        at += context + written
    return spans


def token_columns(arrays: Mapping[str, np.ndarray], index: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """Values of each token of a rollout. Log-probabilities are None for tokens that the policy did not sample."""
    offsets = arrays["offsets"]
    start, end = int(offsets[index]), int(offsets[index + 1])
    ids = arrays["token_ids"][start:end]
    if not 0 <= start <= end or len(ids) != end - start:
        raise ValueError("its offsets do not match its tokens")
    mask = arrays["loss_mask"][start:end] == 1
    sampled = np.ones(len(ids), bool)
    for first, last in context_spans(line):
        sampled[first:last] = False
    if len(mask) != len(ids) or (mask & ~sampled).any():
        raise ValueError("its mask does not match the turns")

    def values(name: str, where: np.ndarray) -> list[float | None] | None:
        if name not in arrays:
            return None
        own = arrays[name][start:end].astype(float)
        if len(own) != len(ids):
            raise ValueError(f"{name} has another length than the tokens")
        known = where & np.isfinite(own)
        listed = own.tolist() if known.all() else [value if ok else None for value, ok in zip(own, known, strict=True)]
        return listed if known.any() else None

    advantages = values("token_advantages", mask) if line.get("by_token") else None
    own = finite_number(line.get("advantage"))
    if advantages is None and own is not None:
        advantages = [own if trained else None for trained in mask.tolist()]
    return {
        "ids": ids.tolist(),
        "mask": mask.astype(int).tolist(),
        "sampled": sampled.astype(int).tolist(),
        "engine_logprobs": values("engine_logprobs", sampled),
        "sampling_logprobs": values("sampling_logprobs", sampled),
        "trainer_logprobs": values("trainer_logprobs", mask),
        "ref_logprobs": values("ref_logprobs", mask),
        "entropies": values("entropies", mask),
        "advantages": advantages,
    }


def turns_of(line: Mapping[str, Any], contexts: Sequence[str] | None) -> list[dict[str, Any]]:
    """The episode as a list of contexts (a prompt or an observation) and actions (what the policy wrote)."""
    turns = line.get("turns")
    if not isinstance(turns, list) or not turns:
        facts = {"text": line.get("text"), "tokens": line.get("length"), "finish": line.get("finish")}
        return [{"role": "action", **facts}]
    found: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        text = contexts[number] if contexts is not None and number < len(contexts) else None
        found.append({"role": "context", "text": text, "tokens": turn.get("context_tokens")})
        found.append({**{key: value for key, value in turn.items() if key != "context_tokens"}, "role": "action"})
    return found


def cleaned(value: Any) -> Any:
    """A line of a rollout file: names of numbers that are not finite become None; turns are dictionaries."""
    line = dict(value)
    for name in ("reward", "advantage"):
        if name in line:
            line[name] = finite_number(line[name])
    verdict = line.get("verdict")
    if isinstance(verdict, dict):
        parts = verdict.get("parts")
        line["verdict"] = {
            **verdict,
            "reward": finite_number(verdict.get("reward")),
            "parts": {k: finite_number(v) for k, v in parts.items()} if isinstance(parts, dict) else {},
        }
    turns = line.get("turns")
    line["turns"] = [dict(turn) for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    for turn in line["turns"]:
        turn |= {name: finite_number(turn[name]) for name in ("reward", "kept_mass", "entropy") if name in turn}
    return line
