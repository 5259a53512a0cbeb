"""Load a model from a Hugging Face folder, a GGUF file or the hub; or build a small one with random weights.

transformers and the hub's client report progress through tqdm only, so a class in place of tqdm passes the counts on,
and `Console` draws them.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from assay.models.base import HFModel, LoadOptions, LoadReport, PolicyModel
from assay.models.decoder import Decoder, WeightLoader, empty_decoder
from assay.models.gguf import is_gguf, load_gguf
from assay.models.spec import FAMILIES, ModelSpec, spec_from_hf
from assay.system.model_files import check_model_files
from assay.types import UserError, missing_extra, unknown_name

FORMS = "a Hugging Face folder, a .gguf file, a hub id such as org/name, preset:NAME, or run:NAME@STEP"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL = 10_000_000  # weights; below that, a file that lacks some is reported by their names
WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


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


def load_model(
    source: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    cache_dir: str | Path | None = None,
    report: LoadReport | None = None,
) -> PolicyModel:
    """`Decoder` if it covers the model's family, else transformers' own model behind the same interface.

    `report`: receives how much is loaded and how much there is: parameters of the decoder, tensors of other models,
    or bytes of a download.
    """
    options = LoadOptions(device, dtype, report, trust_remote_code)
    path = Path(source).expanduser()
    if path.is_file():
        if not is_gguf(path):
            raise UserError(f"'{source}' is a file, but not a GGUF: give {FORMS}")
        return load_gguf(path, options) or load_fallback(path.parent, options, path.name)
    if not path.is_dir():
        path = fetch_model(source, cache_dir, report)
    return load_folder(path, options)


def fetch_model(source: str, cache_dir: str | Path | None = None, report: LoadReport | None = None) -> Path:
    """Download a model of the hub unless it is in the local cache; returns its folder. `report`: receives bytes."""
    if not HUB_ID.fullmatch(source):
        raise UserError(f"there is no model at '{source}': give {FORMS}")
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        bar = reporting_bar(report, "bytes", only=BYTES)
        return Path(snapshot_download(source, cache_dir=cache_dir, allow_patterns=list(patterns), tqdm_class=bar))

    try:
        folder = fetch(*SMALL_FILES, "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            fetch("pytorch_model*")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"'{source}' is not a local folder, and fetching it from the Hugging Face hub failed ({reason}): "
            "give a local folder or a .gguf file"
        ) from error
    return folder


def load_folder(folder: Path, options: LoadOptions) -> PolicyModel:
    check_model_files(folder)
    config = read_json(folder / "config.json", f"'{folder}' is not a model folder: it has no config.json; give {FORMS}")
    spec = spec_from_hf(config)
    files = weight_files(folder)
    if spec is None:
        return load_fallback(folder, options)
    check_size(folder, spec, files)
    loader = WeightLoader(spec, f"the model in '{folder}'", options)
    for file in files:
        (load_safetensors if file.suffix == ".safetensors" else load_pickled)(file, loader)
    return loader.finish()


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


def has_weights(folder: Path) -> bool:
    """False for a folder that has a config and no weights."""
    return not (folder / "config.json").is_file() or any(True for kind in WEIGHTS for _ in folder.glob(kind))


def empty_model(folder: Path, device: str | torch.device, dtype: torch.dtype) -> Decoder | None:
    """A model whose weights are zeros, for a folder that has only a config; None if it is not of our families."""
    check_model_files(folder)
    spec = spec_from_hf(read_json(folder / "config.json", f"'{folder}' has no config.json"))
    if spec is None:
        return None
    model = empty_decoder(spec, device, dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return model


def is_classifier(source: str) -> bool:
    """Whether config.json names a sequence-classification model. Of a model of the hub, only that file is fetched."""
    file = Path(source).expanduser() / "config.json"
    if HUB_ID.fullmatch(source) and not file.parent.exists():
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(source, "config.json"))
        except (OSError, ValueError):  # reported when the model is loaded
            return False
    names = read_json(file, "").get("architectures") if file.is_file() else None
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def check_model_folder(source: str) -> None:
    """Refuse a folder that has files, but no model; other sources are checked when they are loaded."""
    folder = Path(source).expanduser()
    if (folder / "tokenizer.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"'{source}' has a tokenizer but no model: config.json and the weights are missing; give {FORMS}"
        )


def check_size(folder: Path, spec: ModelSpec, files: list[Path]) -> None:
    """Refuse a config that asks for more weights than the files can hold, before allocating memory for them."""
    stored = sum(file.stat().st_size for file in files)
    if spec.parameters > stored + SMALL:  # every format takes at least a byte per weight
        raise UserError(
            f"config.json in '{folder}' asks for {spec.parameters:,} weights, but its files have {stored:,} bytes: "
            "fetch the model again"
        )


def load_safetensors(file: Path, loader: WeightLoader) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as stored:

            def write(name: str, target: Tensor) -> None:
                target.copy_(stored.get_tensor(name))

            for name in stored.keys():  # noqa: SIM118 (a file, not a dict)
                loader.load(name, stored.get_slice(name).get_shape(), partial(write, name))
    except (SafetensorError, OSError) as error:
        raise UserError(f"'{file}' is damaged or incomplete ({error}): fetch it again") from error


def load_pickled(file: Path, loader: WeightLoader) -> None:
    """Load a pytorch_model.bin without executing code that it may contain."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
        plain = isinstance(stored, dict) and all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in stored.items()
        )
    except Exception as error:  # damaged or malicious files make the reader fail in any way
        raise UserError(f"'{file}' is damaged, or holds more than plain weights: fetch safetensors instead") from error
    if not plain:
        raise UserError(f"'{file}' holds more than plain weights: fetch safetensors instead")
    for name, tensor in stored.items():
        loader.load(name, tensor.shape, methodcaller("copy_", tensor))


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights; safetensors are preferred."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        single, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            return indexed_files(index)
    loose = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    if not loose:
        raise UserError(f"'{folder}' has a config.json but no weights: model.safetensors or its index is missing")
    return loose


def indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index, f"'{index}' is missing").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"'{index}' names no weights: fetch the model again")
    names = {str(name) for name in weight_map.values()}
    if any(Path(name).name != name for name in names):
        raise UserError(f"'{index}' names files outside of its folder: fetch the model again")
    files = [index.parent / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"'{index.parent}' lacks {', '.join(missing)}, which its index names: fetch the model again")
    return files


def read_json(file: Path, if_missing: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(if_missing) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{file}' cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"'{file}' holds no JSON object: fetch the model again")
    return content


def shape(family: str, hidden: int, heads: int, **sizes: Any) -> ModelSpec:
    """A spec whose vocabulary size and maximum length are set later."""
    sizes |= {"vocab_size": 0, "max_length": 0, "head_dim": hidden // heads, "qk_norm": FAMILIES[family].qk_norm}
    return ModelSpec(family=family, hidden=hidden, heads=heads, **sizes)


# Comments: number of weights without the embedding, which adds vocabulary x hidden.
PRESETS: dict[str, ModelSpec] = {
    "pico": shape("qwen3", hidden=64, layers=2, heads=4, kv_heads=2, intermediate=256),  # 0.12M
    "nano": shape("qwen3", hidden=64, layers=4, heads=4, kv_heads=2, intermediate=256),  # 0.25M
    "tiny": shape("qwen3", hidden=128, layers=4, heads=4, kv_heads=4, intermediate=384),  # 0.85M
    "tiny-llama": shape("llama", hidden=128, layers=4, heads=4, kv_heads=4, intermediate=384),  # 0.85M
    "small": shape("qwen3", hidden=256, layers=5, heads=8, kv_heads=8, intermediate=704),  # 4.0M
    "base": shape("qwen3", hidden=384, layers=7, heads=6, kv_heads=6, intermediate=1024),  # 12.4M
    "medium": shape("qwen3", hidden=512, layers=9, heads=8, kv_heads=8, intermediate=1408),  # 28.9M
}


def preset(name: str, vocab_size: int, max_length: int) -> ModelSpec:
    """The spec of a preset for a given vocabulary size and maximum length."""
    if name not in PRESETS:
        raise unknown_name("model preset", name, PRESETS)
    if vocab_size < 1 or max_length < 1:
        raise UserError(
            f"preset '{name}' needs a vocabulary and a length of at least 1, not {vocab_size} and {max_length}"
        )
    return replace(PRESETS[name], vocab_size=vocab_size, max_length=max_length)


def build_preset(name: str, vocab_size: int, max_length: int, seed: int) -> Decoder:
    """A preset with random weights, which depend on the seed only."""
    model = empty_decoder(preset(name, vocab_size, max_length), "cpu")
    model.initialise(seed)
    return model
