"""A tiny random classification model with a word tokenizer, and transformers' own logits of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.rewards.reward_model import RewardModelWorker

SPECIAL = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
COMMON = ["two", "plus", "is", "four", "five", "nice", "rude", "very", "what", "the", "answer", "good", "bad"]
WORDS = [*SPECIAL, *COMMON]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"  # one token each
)


class LocalWorker:
    """Computes in this process: another one takes seconds to start."""

    def __init__(self, source: str, *options: Any) -> None:
        self.worker = RewardModelWorker()
        self.worker.load(source, *options)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def close(self) -> None:
        pass


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)


def save_classifier(
    folder: Path,
    labels: int = 1,
    template: str | None = TEMPLATE,
    pad_id: int | None = 0,
    family: str = "qwen2",
    scale: float = 0.6,
    **options: Any,
) -> Path:
    """`scale`: standard deviation of the weights. `options`: more fields of the config."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": pad_id, "bos_token_id": None, "eos_token_id": None}
    sizes |= {"num_key_value_heads": 2, "vocab_size": len(WORDS), "max_position_embeddings": 32, "num_labels": labels}
    config = AutoConfig.for_model(family, **sizes | ids | options)
    model = AutoModelForSequenceClassification.from_config(config)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    save_tokenizer(folder, template)
    return folder


def transformers_logits(
    folder: Path, conversations: Sequence[Sequence[dict[str, str]]], dtype: str = "float32"
) -> list[list[float]]:
    """One conversation at a time, with the template applied by hand."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    texts = [" ".join(f"<{one['role']}> {one['content']} <end>" for one in talk) for talk in conversations]
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids_of(text)])).logits[0].tolist() for text in texts]


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]
