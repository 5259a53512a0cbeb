"""Puts weights into a decoder one at a time, so that loading needs little memory beyond the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec
from assay.types import UserError

EMBEDDING = "model.embed_tokens.weight"
NAMED = 5  # how many weights an error message lists


class Filler:
    """A decoder under construction. `place` each weight under its Hugging Face name, then `finish`."""

    def __init__(self, spec: ModelSpec, what: str, device: torch.device | str, dtype: torch.dtype) -> None:
        self.what, self.spec = what, spec
        with torch.device("meta"):
            self.model = Decoder(spec)
        self.model.to(dtype).to_empty(device=device)
        self.empty = dict(self.model.named_parameters())
        self.targets = dict(self.empty)
        self.unexpected: list[str] = []

    @torch.no_grad()
    def place(self, name: str, shape: Sequence[int], write: Callable[[Tensor], None]) -> None:
        """Lets `write` fill the weight called `name`, if the model has it and the shape is right."""
        name = canonical(name)
        if name.endswith("rotary_emb.inv_freq"):
            return  # recomputed from the config
        if self.spec.tied and name == "lm_head.weight":
            if EMBEDDING not in self.empty:
                return
            name = EMBEDDING  # stands in for an embedding that is not stored; one that comes later replaces it
        if name not in self.targets:
            self.unexpected.append(name)
            return
        target = self.targets[name]
        if tuple(shape) != tuple(target.shape):
            expected = list(target.shape)
            raise UserError(f"{self.what}: weight {name} has shape {list(shape)}, but its config asks for {expected}")
        write(target)
        self.empty.pop(name, None)

    def finish(self) -> Decoder:
        if self.empty:
            raise UserError(f"{self.what} lacks weights that its config asks for: {listed(list(self.empty))}")
        if self.unexpected:
            raise UserError(f"{self.what} has weights that its config does not know: {listed(self.unexpected)}")
        return self.model


def canonical(name: str) -> str:
    """Checkpoints saved without the language-model head leave out the outer 'model.'."""
    bare = name.startswith(("embed_tokens.", "layers.", "norm."))
    return f"model.{name}" if bare else name


def listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(sorted(names)[:NAMED]) + more
