from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train_parts import tiny_decoder

from assay.engine import WeightSource, make_engine
from assay.engine.native.engine import NativeEngine
from assay.train.evaluation import sync_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sync_copies_everything_and_stamps_the_version(dtype: torch.dtype) -> None:
    first, second = tiny_decoder(0, torch.float32), tiny_decoder(1, torch.float32)
    engine = make_engine("native", first, device="cpu", dtype=dtype)
    before = engine.fingerprint()
    sync_weights(second, engine, version=7)
    assert engine.info.version == 7 and engine.fingerprint() != before
    sync_weights(first, engine, version=8)
    assert engine.fingerprint() == before
    with torch.no_grad():
        next(first.parameters()).add_(1.0)
    assert engine.fingerprint() == before  # copied, not shared


class Forgetful(NativeEngine):
    """Loses one number of one weight on the way."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        super().update_weights(source, version)
        with torch.no_grad():
            weight = list(self.network.canonical().values())[-1]
            weight[(0,) * weight.dim()] += 1.0


class Deaf(NativeEngine):
    """Keeps the weights it had first."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        if self.info.version < 0:
            super().update_weights(source, version)
        self.info = replace(self.info, version=version)


@pytest.mark.parametrize("kind", [Forgetful, Deaf])
def test_an_engine_that_serves_other_weights_stops_the_run(kind: type[NativeEngine]) -> None:
    policy = tiny_decoder(0, torch.float32)
    engine = kind(policy.spec, device="cpu", dtype=torch.float32)
    engine.update_weights(policy, 0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="other weights than the trainer holds"):
        sync_weights(policy, engine, version=1)
