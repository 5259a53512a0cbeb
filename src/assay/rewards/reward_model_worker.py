"""The process of a reward model: a sequence-classification model of transformers, its tokenizer, or the latter alone.

`RewardModelProcess` starts this module as a child process, so that the process that asks needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.system.model_files import check_model_files
from assay.system.spawn import RemoteWorker, WorkerDied, serve
from assay.types import UserError, describe_error, excerpt

Conversation = Sequence[Mapping[str, Any]]  # messages; the last is the answer
Item = Conversation | str | Sequence[int]  # a conversation, a text, or token ids
Failed = str  # why there are no outputs
Outputs = list[float] | Failed


class RewardModelProcess:
    """The process, as another one sees it. It starts with the first call, and again after it has died."""

    def __init__(
        self, source: str, device: str, with_model: bool = True, dtype: str = "auto", threads: int = 0
    ) -> None:
        self._load = (source, device, with_model, dtype)
        self._environment = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        self.worker: RemoteWorker | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `RewardModelWorker`; raises `WorkerDied` if the process ends instead."""
        if self.worker is None:
            self.worker = self._start()
        try:
            return self.worker.call(method, *arguments)
        except WorkerDied:
            self.close()
            raise

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _start(self) -> RemoteWorker:
        worker = RemoteWorker(__name__, environment=os.environ | self._environment)
        try:
            worker.call("load", *self._load)
        except BaseException:
            worker.close()
            raise
        return worker


class RewardModelWorker:
    """Methods are called by name, `load` first."""

    model: Any = None
    max_length = 0  # tokens; 0: no limit

    def load(self, source: str, device: str, with_model: bool = True, dtype: str = "auto") -> None:
        """Load the tokenizer and, unless it is not needed, the model."""
        path = str(Path(source).expanduser()) if Path(source).expanduser().exists() else source
        if Path(path).is_dir():
            check_model_files(Path(path))
        try:
            self.tokenizer: Any = load_tokenizer(path)
            if with_model:
                self._load_model(path, device, dtype)
        except Exception as error:  # a damaged file can raise any error in transformers
            what = "classification model" if with_model else "tokenizer"
            raise UserError(f"'{source}' cannot be loaded as a {what} ({describe_error(error)})") from None

    def _load_model(self, path: str, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        name = ("bfloat16" if chosen.type == "cuda" else "float32") if dtype == "auto" else dtype
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=getattr(torch, name), use_safetensors=True, output_loading_info=True
        )
        self.model, info = loaded
        if missing := sorted(info["missing_keys"]):  # a language model has no head for scores
            raise ValueError(f"it lacks the weights {', '.join(missing[:3])}")
        self.model.to(chosen).eval()
        config = self.model.config.get_text_config()
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        self.pads = config.pad_token_id is not None  # else a batch has one sequence: transformers finds no last token

    def info(self) -> dict[str, Any]:
        """Properties of the model that a server reports."""
        config = self.model.config
        labels = [str(config.id2label.get(index, index)) for index in range(config.num_labels)]
        where = f"{str(self.model.dtype).removeprefix('torch.')} on {self.model.device}"
        return {
            "labels": labels,
            "activation": activation_of(config.problem_type, len(labels)),
            "max_length": self.max_length,
            "parameters": self.model.num_parameters(),
            "where": where,
        }

    def render(self, conversations: Sequence[Conversation]) -> list[list[int] | Failed]:
        """Token ids: by the chat template, or question and answer as a pair if the tokenizer has none."""
        return [problem or ids for ids, problem in map(self._encode, conversations)]

    def _encode(self, item: Item) -> tuple[list[int], Failed]:
        """Token ids, and why they could not be computed."""
        try:
            return self._ids(item), ""
        except Exception as error:  # a chat template can raise any error
            return [], f"the chat template rejects the messages ({excerpt(str(error))})"

    def _ids(self, item: Item) -> list[int]:
        if isinstance(item, str):
            return list(self.tokenizer(item)["input_ids"])
        if not all(isinstance(part, Mapping) for part in item):
            return list(item)  # type: ignore[arg-type]
        messages: list[dict[str, str]] = list(map(dict, item))  # type: ignore[arg-type]
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        question = "\n\n".join(message["content"] for message in messages[:-1])
        return list(self.tokenizer(question, messages[-1]["content"])["input_ids"])

    def outputs(self, conversations: Sequence[Conversation], batch_tokens: int) -> list[Outputs]:
        """The model's outputs, one number per label, in order."""
        return [outputs for outputs, _ in self.classify(conversations, batch_tokens)]

    def classify(self, items: Sequence[Item], batch_tokens: int, max_tokens: int = 0) -> list[tuple[Outputs, int]]:
        """The model's outputs and the number of tokens of each item, in order. `max_tokens`: per item; 0: no limit."""
        encoded = [self._encode(item) for item in items]
        longest = min((limit for limit in (self.max_length, max_tokens) if limit), default=0)
        results: list[Outputs] = [problem or self._problem(ids, longest) for ids, problem in encoded]
        good = {index: ids for index, (ids, _) in enumerate(encoded) if not results[index]}
        for batch in self._batches(good, batch_tokens):
            for index, values in zip(batch, self._compute([good[index] for index in batch]), strict=True):
                results[index] = values
        return [(result, len(ids)) for result, (ids, _) in zip(results, encoded, strict=True)]

    def _problem(self, ids: Sequence[int], longest: int) -> Failed:
        """Why the model cannot read these tokens; empty if it can."""
        if not ids:
            return "the input has no tokens"
        if longest and len(ids) > longest:
            return f"the input has {len(ids)} tokens; the maximum is {longest}"
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return f"a token id is outside the vocabulary of {self.vocab_size}"
        return ""

    def _batches(self, sequences: Mapping[int, Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
        """Indices of sequences of similar length: at most `batch_tokens` with padding, or a single one."""
        batch: list[int] = []
        for index in sorted(sequences, key=lambda index: len(sequences[index])):
            if batch and (len(sequences[index]) * (len(batch) + 1) > batch_tokens or not self.pads):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _compute(self, sequences: Sequence[Sequence[int]]) -> list[Outputs]:
        """The logits of a batch; halved if it does not fit into memory."""
        import torch

        try:
            with torch.inference_mode():
                ids, mask = padded(sequences, self.model.config.get_text_config().pad_token_id or 0)
                device = self.model.device
                logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
                return logits.float().cpu().tolist()
        except torch.OutOfMemoryError:
            if len(sequences) == 1:
                return [f"there is not enough memory for {len(sequences[0])} tokens"]
        half = len(sequences) // 2
        return self._compute(sequences[:half]) + self._compute(sequences[half:])


def activation_of(problem_type: str | None, labels: int) -> str:
    """How outputs become probabilities, as in vLLM: by the kind of problem that the model was trained for."""
    if problem_type == "regression":
        return "identity"
    return "sigmoid" if problem_type == "multi_label_classification" or labels == 1 else "softmax"


def load_tokenizer(path: str) -> Any:
    """The tokenizer as stored in tokenizer.json; transformers would choose a class by the type of the model."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not Path(path).is_dir() or (Path(path) / "tokenizer.json").is_file():
        try:
            return PreTrainedTokenizerFast.from_pretrained(path)
        except (OSError, ValueError):  # a hub id without tokenizer.json
            pass
    return AutoTokenizer.from_pretrained(path)


def padded(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Any, Any]:
    """Token ids, filled up on the right, and a mask of the tokens that are not filled up."""
    import torch

    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(list(sequence))
        mask[row, : len(sequence)] = 1
    return ids, mask


def main() -> None:
    serve(RewardModelWorker())
