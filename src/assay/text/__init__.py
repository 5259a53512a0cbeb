"""Chat templates, tokenization and loss masks: messages <-> token ids."""

from assay.text.render import (
    DEFAULT_TEMPLATE,
    Renderer,
    Shot,
    Style,
    few_shot_from_prompts,
    load_few_shot,
    read_text_file,
)
from assay.text.tokenizer import Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer

__all__ = [
    "DEFAULT_TEMPLATE",
    "Renderer",
    "Shot",
    "Style",
    "Tokenizer",
    "char_tokenizer",
    "few_shot_from_prompts",
    "load_few_shot",
    "load_tokenizer",
    "read_text_file",
    "word_tokenizer",
]
