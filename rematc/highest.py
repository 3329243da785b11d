"""The highest that CUDA's allocator stood, for all who ask: torch knows one, and begins it anew for all."""

from __future__ import annotations

import weakref
from typing import ClassVar

import torch


class Highest:
    """The most bytes given out on ``device`` since this was made, or last began anew."""

    _all: ClassVar[weakref.WeakSet[Highest]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device, self._seen = _with_index(device), 0
        self.begin_anew()
        self._all.add(self)

    def begin_anew(self) -> None:
        """What was before does not count; to the others it does."""
        forget(self.device)
        self._seen = 0

    def read(self) -> int:
        """By now."""
        return max(self._seen, torch.cuda.max_memory_allocated(self.device))


def forget(device: torch.device) -> None:
    """Have torch begin anew; who asked before does not lose what was."""
    device = _with_index(device)
    peak = torch.cuda.max_memory_allocated(device)
    for other in Highest._all:
        if other.device == device:
            other._seen = max(other._seen, peak)
    torch.cuda.reset_peak_memory_stats(device)


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` is the one that is current now."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
