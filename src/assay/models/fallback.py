"""Any causal language model of transformers, as a `PolicyModel`; counts of the progress bars of transformers.

The model is slower than `Decoder` (padded batches, full logits), but exact for every architecture: learned positions,
unusual heads, soft-capped logits.

transformers and the hub's client report progress through tqdm only, so a class in place of tqdm passes the counts on,
and `Console` draws them.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from assay.models.attention import Padded
from assay.models.base import LoadOptions, LoadReport, PolicyModel
from assay.types import UserError, missing_extra

BYTES = "B"  # unit of bars that count bytes


def reporting_bar(report: LoadReport | None, unit: str, only: str | None = None) -> type[tqdm]:
    """A class like tqdm that draws nothing and passes its counts to `report`, as counts of `unit`.

    `only`: bars with another tqdm unit report nothing, and if several count the same, the largest count is reported.
    """
    lock, most = Lock(), 0  # bars are updated by several threads

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})
            self.reports = report is not None and only in (None, options.get("unit"))

        def __iter__(self) -> Iterator[Any]:
            for item in self.iterable:
                yield item
                self.update()

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            with lock:
                self.n += n or 0
                if self.reports and report is not None and self.total and self.n > most:
                    most = 0 if only is None else int(self.n)
                    report(int(self.n), int(self.total), unit)

    return ReportingBar


@contextmanager
def reported_bars(report: LoadReport | None) -> Iterator[None]:
    """Within the block, bars of transformers are not drawn, and `report` receives how many weights are loaded."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    bar, shown = reporting_bar(report, "tensors"), logging.is_progress_bar_enabled()
    hook, gguf_bar = logging.set_tqdm_hook(lambda _, args, options: bar(*args, **options)), gguf.tqdm
    gguf.tqdm = bar  # does not ask the hook
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        gguf.tqdm = gguf_bar
        if shown:
            logging.enable_progress_bar()


if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
NO_LIMIT = 1 << 20  # configs of recurrent models and of relative positions have no maximum length


class HFModel(PolicyModel):
    """`hidden` returns the model's logits, and `unembed` is the identity."""

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
        """The model itself stays in evaluation mode: with dropout, trainer and sampling policy would differ."""
        super().train(mode)
        self.hf.eval()
        return self

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        """Logits [N, vocabulary]: sequences are right-padded, which causal attention ignores, and packed again."""
        layout = Padded(lengths, ids.device)
        shape = (layout.batch, layout.longest)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs = {key: scatter(values, layout).view(shape) for key, values in inputs.items()}
        if self.takes_positions:
            inputs["position_ids"] = torch.arange(layout.longest, device=ids.device).expand(shape)
        output = self.hf(**inputs, use_cache=False)
        return output.logits.flatten(0, 1).index_select(0, layout.slots)

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden

    @property
    def network(self) -> nn.Module:
        return self.hf


def scatter(values: Tensor, layout: Padded) -> Tensor:
    return values.new_zeros(layout.batch * layout.longest).index_copy(0, layout.slots, values)


def load_fallback(folder: Path, options: LoadOptions, gguf_file: str | None = None) -> HFModel:
    """Load with transformers. `gguf_file`: name of a GGUF file in the folder."""
    import transformers

    given: dict[str, Any] = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}
    what = folder / gguf_file if gguf_file else folder
    if gguf_file is not None:
        if importlib.util.find_spec("accelerate") is None:
            raise missing_extra(f"loading {what} with transformers", "gguf")
        given["gguf_file"] = gguf_file
        if hasattr(transformers, "GgufConfig"):  # keeps GGUF weights quantised, hence not trainable, by default
            given["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with reported_bars(options.report):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, **given
            )
    except Exception as error:  # a damaged file can raise any error in transformers
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"transformers cannot load the model in {what}: {reason}") from error
    hf, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"the model in {what} lacks weights that {type(hf).__name__} needs: {', '.join(missing[:5])}")
    return HFModel(hf.to(options.device))
