"""How long something takes on a GPU: by its own events, and often enough in a row."""

from __future__ import annotations

from collections.abc import Callable

import torch

ENOUGH_NS, MOST = 1_000_000, 50  # of runs in a row, and how many


def cuda_ns(run: Callable[[], object], device: torch.device) -> float:
    """Nanoseconds of one run of ``run``, from several in a row: alone it would have to wait for its launch.

    What is shorter than its launch takes as long as that.
    """
    with torch.cuda.device(device):
        first = _each_ns(run, 1)
        times = min(MOST, int(ENOUGH_NS / max(1.0, first)))
        return _each_ns(run, times) if times > 1 else first


def _each_ns(run: Callable[[], object], times: int) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    for _ in range(times):
        run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e6 / times
