"""The same work done by transformers' own `generate`, to compare with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from assay.engine import Request, SamplingParams
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.fallback import HFModel
from assay.models.spec import spec_to_hf


class TransformersPeer:
    """The same weights, in the engine's dtype, on the engine's device."""

    def __init__(self, model: PolicyModel, device: torch.device, dtype: torch.dtype, batch: int) -> None:
        self.hf, self.device, self.batch = transformers_model(model, device, dtype), device, batch

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> int:
        """How many tokens were asked for: a batch runs until its longest ends, and what is beyond does not count."""
        rows = [(request.prompt_ids, request.params) for request in requests for _ in range(request.params.n)]
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch]
            new = max(params.max_new_tokens for _, params in part)
            ids = torch.tensor([list(prompt) for prompt, _ in part], device=self.device)  # all of one length
            config = generation_config(part[0][1], new)
            out = self.hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert out.shape == (len(part), ids.shape[1] + new), "transformers stopped early"
        return sum(params.max_new_tokens for _, params in rows)


def generation_config(params: SamplingParams, new: int) -> Any:
    from transformers import GenerationConfig

    drawing: dict[str, Any] = {
        "do_sample": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
    }
    how = drawing if params.temperature > 0 else {"do_sample": False}
    return GenerationConfig(max_new_tokens=new, pad_token_id=0, **how)


def transformers_model(model: PolicyModel, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(model, HFModel):
        hf: Any = copy.deepcopy(model.hf)
        hf.to(device=device, dtype=dtype)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        assert isinstance(model, Decoder)
        settings = spec_to_hf(model.spec)
        settings |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
        with torch.device(device):
            hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=dtype)
        missing, unexpected = hf.load_state_dict(dict(model.weights()), strict=False)
        assert not unexpected and set(missing) <= ({"lm_head.weight"} if model.spec.tied else set())
        hf.tie_weights()
    if hf.generation_config is not None:
        hf.generation_config.eos_token_id = None  # would be taken where ours names none
    return hf.eval()
