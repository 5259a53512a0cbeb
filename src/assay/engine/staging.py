"""Small arrays on their way to the device, without waiting for it and without asking for pinned memory each time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SIZE = 1 << 25  # bytes; each half is used up before the other is used again
ALIGNMENT = 64


class Staging:
    """A ring of two halves of pinned memory. Before a half is used again, all that was sent from it has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.place, self.half = 0, SIZE // 2
        self.memory: Tensor | None = None
        self.sent: list[torch.cuda.Event | None] = [None, None]  # recorded when a half was used up

    def upload(self, values: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda":
            return host.to(self.device)
        if values.nbytes == 0 or values.nbytes > self.half:
            return host.to(self.device)
        if self.memory is None:
            self.memory = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        pinned = self._room(values.nbytes).view(host.dtype).view(host.shape)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def _room(self, size: int) -> Tensor:
        assert self.memory is not None
        start = -(-self.place // ALIGNMENT) * ALIGNMENT
        current = self.place // self.half if self.place < SIZE else 1
        if start + size > (current + 1) * self.half:
            event = torch.cuda.Event()
            event.record()
            self.sent[current] = event
            current = 1 - current
            start = current * self.half
            arrived = self.sent[current]
            if arrived is not None:
                arrived.synchronize()
        self.place = start + size
        return self.memory[start : start + size]
