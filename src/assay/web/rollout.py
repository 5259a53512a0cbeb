"""One rollout as the page shows it: its line, the arrays of its tokens, and the text of each token.

The tokenizer is read from files of the run, or from the model that its config names, if that is on this machine. There
are no downloads, and no code of models is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from assay.runs.directory import setting
from assay.text.stream import REPLACEMENT, Detokenizer
from assay.types import UserError, describe_error
from assay.web.folder import RunFolder, finite_number
from assay.web.index import IndexedFile, arrays_name, integer, reason_of

FILE = "tokenizer.json"
MAX_SIZE = 256 * 2**20  # bytes of a tokenizer.json
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


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


# Texts of tokens


class RunTokenizer:
    """A tokenizer of the tokenizers package, for decoding only."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        decoder = getattr(backend, "decoder", None)
        state = decoder.__getstate__() if decoder is not None else b""
        self._byte_level = b"ByteLevel" in (state if isinstance(state, bytes) else b"")

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> tuple[list[str], dict[int, str]]:
        """The text of each token: joined, they are the decoded text. And bytes, in hexadecimal, by position.

        Of a character that takes several tokens, the last token has the text. The tokens of such characters, and
        those that are not valid UTF-8, have their bytes in the second result.
        """
        detokenizer = Detokenizer(self.decode)
        texts = [detokenizer.add([index]) for index in ids]
        if texts:
            texts[-1] += detokenizer.finish()
        return texts, self._bytes_of(ids, texts)

    def _bytes_of(self, ids: Sequence[int], texts: Sequence[str]) -> dict[int, str]:
        found: dict[int, str] = {}
        for place, text in enumerate(texts):
            is_part = not text or REPLACEMENT in text or (place > 0 and not texts[place - 1])
            if is_part and (raw := self._token_bytes(ids[place])) and not is_utf8(raw):
                found[place] = raw.hex(" ").upper()
        return found

    def _token_bytes(self, index: int) -> bytes:
        token = self._backend.id_to_token(index)
        if token is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        if self._byte_level:
            with suppress(KeyError):  # an added token, which is ordinary text
                return bytes(_BYTES[character] for character in token)
        return b""


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves, the other bytes are numbered from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def load_tokens(folder: RunFolder) -> tuple[RunTokenizer | None, str | None]:
    """The tokenizer of a run, or why there is none. May take seconds."""
    problems = []
    for path in _candidates(folder):
        try:
            return RunTokenizer(_load(path)), None
        except Exception as error:  # damaged files make the libraries raise any exception
            problems.append(f"{path} cannot be read ({describe_error(error, 120)})")
    if problems:
        return None, f"no tokenizer: {problems[0]}"
    return None, f"no tokenizer in the run's checkpoints: copy the model's {FILE} to {folder.path / 'tokenizer'}"


def _candidates(folder: RunFolder) -> Iterator[Path]:
    """Files and folders with a tokenizer, the run's own first."""
    checkpoints = [f"checkpoints/{name}/model" for name in reversed(folder.names("checkpoints"))]
    for name in ("tokenizer", *checkpoints, "base", "reference"):
        with suppress(OSError):
            yield folder.resolve(f"{name}/{FILE}")
    config, _ = folder.config()
    environment, _ = folder.document("environment.json")
    for key in ("tokenizer", "source"):
        source = setting(config, f"model.{key}")
        if isinstance(source, str) and source and "\0" not in source and ":" not in source:
            yield from _local(source, environment)


def _local(source: str, environment: Mapping[str, Any]) -> Iterator[Path]:
    """A model on this machine: a path, also relative to the folder of the run's command, or in the hub's cache."""
    started_in = environment.get("folder")
    path = Path(source).expanduser()
    bases = [Path(), *([Path(started_in)] if isinstance(started_in, str) and "\0" not in started_in else [])]
    for base in bases:
        with suppress(OSError):
            full = base / path
            if full.is_file() and full.suffix.lower() == ".gguf":
                yield full
            elif (full / FILE).is_file():
                yield full / FILE
            elif full.is_dir():
                yield full
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        with suppress(Exception):  # not in the cache, or not a valid name
            from huggingface_hub import try_to_load_from_cache

            if isinstance(cached := try_to_load_from_cache(source, FILE), str):
                yield Path(cached)


def _load(path: Path) -> Any:
    if path.name == FILE:
        from tokenizers import Tokenizer as Backend  # much faster than transformers, whose import takes seconds

        if path.stat().st_size > MAX_SIZE:
            raise UserError(f"it has more than {MAX_SIZE >> 20} MiB")
        return Backend.from_file(str(path))
    from assay.text.tokenizer import load_tokenizer

    return load_tokenizer(str(path)).hf.backend_tokenizer
