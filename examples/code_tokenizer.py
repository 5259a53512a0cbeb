"""Train a tokenizer on the generated problems of the task `code`, for a preset model: see configs/code-small.toml.

    python examples/code_tokenizer.py runs/code-tokenizer

A problem then has about 140 tokens and a program about 40, instead of 550 and 90 characters.
"""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from assay.tasks import make_task

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(problems: int = 3000, size: int = 1024) -> PreTrainedTokenizerFast:
    """Byte-level BPE on train problems and their programs."""
    prompts = make_task("code", steps=[1, 2]).prompts("train")[:problems]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((f"{prompt.question}\n{prompt.solution}" for prompt in prompts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )


if __name__ == "__main__":
    train_tokenizer().save_pretrained(sys.argv[1])
