"""The process of a reward model: a sequence-classification model of transformers, its tokenizer, or the latter alone.

`RewardModelJudge` starts this module as a child process, so that judging needs no torch in the process that asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.process.spawn import serve
from assay.types import UserError

Conversation = Sequence[Mapping[str, str]]  # messages; the last is the answer
Failed = str  # why a conversation has no outputs


class RewardModelWorker:
    """Methods are called by name, `load` first."""

    model: Any = None
    max_length = 0  # tokens; 0: no limit

    def load(self, source: str, device: str, with_model: bool = True) -> str:
        """Load the tokenizer and, unless it is not needed, the model. Returns a description."""
        path = str(Path(source).expanduser()) if Path(source).expanduser().exists() else source
        try:
            self.tokenizer: Any = load_tokenizer(path)
            if with_model:
                self._load_model(path, device)
        except Exception as error:  # a damaged file can raise any error in transformers
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            what = "judge.model" if with_model else "judge.tokenizer"
            raise UserError(
                f"{what}: '{source}' cannot be loaded as a {'classification model' if with_model else 'tokenizer'} "
                f"({reason}): give a folder or a hub id, or set judge.url to the server of the model"
            ) from None
        return f"{source} on {self.model.device}" if with_model else source

    def _load_model(self, path: str, device: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
        self.model, info = loaded
        if missing := sorted(info["missing_keys"]):  # a language model has no head for scores
            raise ValueError(f"it lacks the weights {', '.join(missing[:3])}")
        self.model.to(chosen).eval()
        config = self.model.config.get_text_config()
        self.max_length = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.pads = config.pad_token_id is not None  # else a batch has one sequence: transformers finds no last token

    def render(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Token ids: by the chat template, or question and answer as a pair if the tokenizer has none."""
        return [self._ids(list(map(dict, messages))) for messages in conversations]

    def _ids(self, messages: list[dict[str, str]]) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        question = "\n\n".join(message["content"] for message in messages[:-1])
        return list(self.tokenizer(question, messages[-1]["content"])["input_ids"])

    def outputs(self, conversations: Sequence[Conversation], batch_tokens: int) -> list[list[float] | Failed]:
        """The model's outputs, one number per label, in order."""
        sequences = self.render(conversations)
        results: list[list[float] | Failed] = ["" for _ in sequences]
        for batch in self._batches(sequences, results, batch_tokens):
            for index, values in zip(batch, self._compute([sequences[index] for index in batch]), strict=True):
                results[index] = values
        return results

    def _batches(
        self, sequences: Sequence[Sequence[int]], results: list[list[float] | Failed], batch_tokens: int
    ) -> Iterator[list[int]]:
        """Indices of sequences of similar length: at most `batch_tokens` with padding, or a single one."""
        batch: list[int] = []
        for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index])):
            size = len(sequences[index])
            if not size or (self.max_length and size > self.max_length):
                results[index] = f"question and answer have {size} tokens, and the model reads 1 to {self.max_length}"
                continue
            if batch and (size * (len(batch) + 1) > batch_tokens or not self.pads):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _compute(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
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
                raise
        half = len(sequences) // 2
        return self._compute(sequences[:half]) + self._compute(sequences[half:])


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
