"""Chat templates, tokenization and loss masks: messages <-> token ids."""

from assay.text.render import Renderer
from assay.text.tokenizer import Tokenizer, char_tokenizer, load_tokenizer, word_tokenizer

__all__ = ["Renderer", "Tokenizer", "char_tokenizer", "load_tokenizer", "word_tokenizer"]
