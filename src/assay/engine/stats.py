"""What an engine counts while it serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """What the engine did since it was asked to count anew."""

    prefill_tokens: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    preemptions: int = 0
    windows: int = 0  # stretches of steps between two looks of the host
    places: int = 0  # places for tokens in blocks that were in use, added up over windows that were counted
    empty_places: int = 0  # of these, places that held no token
    peak_places: int = 0
    kv_waste_peak: float = 0.0  # share of the places that held no token, when most were in use

    @property
    def kv_waste(self) -> float:
        """Mean share of the places in use that held no token."""
        return self.empty_places / max(self.places, 1)
