"""The trainer's weights, copied to the engine, with proof."""

from __future__ import annotations

from assay.engine.base import Engine
from assay.models import PolicyModel
from assay.models.fingerprint import fingerprint


def sync_weights(policy: PolicyModel, engine: Engine, version: int) -> None:
    """Copy, then compare fingerprints: an engine that serves anything else must stop the run, not bend its curves."""
    engine.update_weights(policy, version)
    served = engine.fingerprint()
    if served is None:  # this backend cannot tell
        return
    expected = fingerprint(policy.weights(), engine.info.dtype)
    if expected != served:
        raise RuntimeError(
            f"after the weight sync of version {version} the engine serves other weights than the trainer holds "
            f"(fingerprints {served[:12]} and {expected[:12]})"
        )
