"""Small tokenizers that need no download. They save and load as ordinary Hugging Face tokenizers."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from assay.text.tokenizer import Tokenizer
from assay.types import UserError

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>", "<tool>")

# One token before a message and one after a reply: a small model's speed depends on the length of its prompts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def char_tokenizer() -> Tokenizer:
    """One token for each printable ASCII character, newline and tab; other characters are <unk>."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    printable = string.digits + string.ascii_letters + string.punctuation + " \n\t"
    backend = Backend(models.BPE(vocab=_numbered(printable), merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()  # no spaces between tokens
    return _wrap(backend)


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token for each given word, number or symbol; whitespace sets them apart, and decoding joins with spaces."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    if not words:
        raise UserError("a word tokenizer needs at least one word")
    for word in words:
        if word.split() != [word]:
            raise UserError(f"a word tokenizer's words hold no whitespace and are not empty, unlike {word!r}")
        if any(special in word for special in SPECIALS):
            raise UserError(f'the word "{word}" contains a special token ({", ".join(SPECIALS)}): leave it out')
    backend = Backend(models.WordLevel(vocab=_numbered(words), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(backend)


def _numbered(entries: Iterable[str]) -> dict[str, int]:
    """Special tokens first, then the entries in the order given, each once."""
    return {entry: index for index, entry in enumerate(dict.fromkeys((*SPECIALS, *entries)))}


def _wrap(backend: object) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast  # late: the import takes seconds

    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIALS[4:]),
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = CHAT_TEMPLATE
    return Tokenizer(hf)
