"""Any causal language model of transformers, behind the same interface as our decoder.

Slower than the decoder (padded batches, full logits), but exact whatever the architecture does: learned positions, odd
heads, soft-capped logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from assay.models.attention import Padded
from assay.models.base import PolicyModel
from assay.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
NO_LIMIT = 1 << 20  # recurrent models and relative positions name no longest sequence


class HFModel(PolicyModel):
    """`hidden` gives the model's own logits, and `unembed` is the identity."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        config = hf.config.get_text_config()
        head = hf.get_output_embeddings()
        self.vocab_size = int(config.vocab_size if head is None else head.weight.shape[0])
        lengths = (getattr(config, key, None) for key in LENGTH_KEYS)
        self.max_length = next((int(length) for length in lengths if length), NO_LIMIT)
        self.takes_positions = "position_ids" in inspect.signature(hf.forward).parameters
        self.train()

    def train(self, mode: bool = True) -> HFModel:
        """Keeps the model itself in evaluation mode: with dropout the trainer would not see the policy that sampled."""
        super().train(mode)
        self.hf.eval()
        return self

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        """Logits [N, vocabulary]: ids are padded on the right, where causal attention never looks, and packed again."""
        layout = Padded(lengths, ids.device)
        shape = (layout.batch, layout.longest)
        extra: dict[str, Any] = {}
        if self.takes_positions:
            extra["position_ids"] = torch.arange(layout.longest, device=ids.device).expand(shape)
        output = self.hf(
            input_ids=scatter(ids, layout).view(shape),
            attention_mask=scatter(torch.ones_like(ids), layout).view(shape),
            use_cache=False,
            **extra,
        )
        return output.logits.flatten(0, 1).index_select(0, layout.slots)

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden

    @property
    def network(self) -> nn.Module:
        return self.hf


def scatter(values: Tensor, layout: Padded) -> Tensor:
    return values.new_zeros(layout.batch * layout.longest).index_copy(0, layout.slots, values)


def load_fallback(
    folder: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> HFModel:
    """Loads through transformers; `gguf_file` names a GGUF inside the folder."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "local_files_only": True}
    if gguf_file is not None:
        options |= {"gguf_file": gguf_file, **dequantised()}
    what = folder / gguf_file if gguf_file else folder
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # files from anywhere make transformers fail in any way
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"transformers cannot load the model in {what}: {reason}") from error
    hf, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"the model in {what} lacks weights that {type(hf).__name__} needs: {', '.join(missing[:5])}")
    return HFModel(hf.to(device))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """The bars of transformers would run into our own console."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def dequantised() -> dict[str, Any]:
    """Newer versions of transformers keep a GGUF's weights quantised, so not trainable, unless told otherwise."""
    import transformers

    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}
