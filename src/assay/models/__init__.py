"""Policy networks: the decoder, and any other causal LM of transformers; loading, building and saving."""

from assay.models.base import HFModel, PolicyModel, fingerprint
from assay.models.decoder import Decoder
from assay.models.device import pick_device, pick_dtype
from assay.models.export import load_adapter, save_adapter, save_model
from assay.models.load import build_preset, load_model, preset
from assay.models.lora import Lora
from assay.models.spec import ModelSpec, spec_from_hf, spec_to_hf

__all__ = [
    "Decoder",
    "HFModel",
    "Lora",
    "ModelSpec",
    "PolicyModel",
    "build_preset",
    "fingerprint",
    "load_adapter",
    "load_model",
    "pick_device",
    "pick_dtype",
    "preset",
    "save_adapter",
    "save_model",
    "spec_from_hf",
    "spec_to_hf",
]
