"""Several ask for the highest that memory was on a GPU, and none takes it from another."""

from __future__ import annotations

import pytest
import torch

from rematc.highest import Highest, forget

CUDA = torch.device("cuda")


class Allocator:
    """CUDA's, as far as it tells."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda _: self.be(self.now, self.now))

    def be(self, now: int, peak: int = 0) -> None:
        self.now, self.peak = now, peak or max(now, self.peak)


def test_who_asked_first_does_not_lose_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.be(90)
    allocator.be(10)
    first = Highest(CUDA)
    assert first.read() == 10
    allocator.be(70)
    allocator.be(20)
    second = Highest(torch.device("cuda:0"))  # the same
    allocator.be(30)
    assert (first.read(), second.read()) == (70, 30)
    forget(torch.device("cuda:0"))
    allocator.be(5)
    assert (first.read(), second.read()) == (70, 30)
    first.begin_anew()
    assert (first.read(), second.read()) == (5, 30)
