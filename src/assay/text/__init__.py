"""Messages <-> token ids and loss masks: the only room that knows chat templates."""

from assay.text.builtin import char_tokenizer, word_tokenizer
from assay.text.few_shot import Shot, few_shot_from_prompts, load_few_shot, read_text_file
from assay.text.raw_template import DEFAULT_TEMPLATE
from assay.text.render import Renderer, Style
from assay.text.tokenizer import Tokenizer, load_tokenizer

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
