"""What one step really takes: the peak of the allocator, and the time. The judge of every plan.

On the CPU the allocator tells the profiler of each allocation and each free, with its address. It
does so only for the threads that the profiler follows (the caller's, where autograd's backward
pass on the CPU runs too), and it knows the size of a block only if it saw it allocated. So frees
of older blocks do not count here: a step that drops gradients from before it measures higher than
it is. Measure with gradients None, or with ``warmup=1``, which has the profiler see them made.
Scratch memory that a library takes past the allocator (oneDNN, MKL) is in no figure.

On CUDA the caching allocator counts for itself, in blocks of 512 bytes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MEMORY = "[memory]"  # how the profiler names an allocation or a free
MARK = "rematc: a measured step begins or ends"

Event = tuple[int, int] | None  # (address, bytes; below zero for a free), or a mark


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step, as measured.

    ``peak_bytes`` is the highest that the allocator's live bytes rose above what was live when the
    step began, ``end_bytes`` what was live at its end, its result included, less the same.
    ``duration_ns`` is the time of the measured step: on the CPU the profiler adds one or
    two microseconds for each op, so compare it only with steps that were measured too.

    >>> Measurement(peak_bytes=3000, end_bytes=500, duration_ns=81_000).peak_bytes
    3000
    """

    peak_bytes: int
    end_bytes: int
    duration_ns: int


def measure(
    step: Callable[[], object], *, device: torch.device | str | None = None, warmup: int = 0
) -> Measurement:
    """Run ``step()`` once, after ``warmup`` runs that do not count, and return what it took.

    ``device`` says whose allocator is read; None is CUDA where it is in use, else the CPU. What
    ``step`` returns is held until all is read, so it counts in ``end_bytes``. Garbage is collected
    beforehand, so that the frees of an earlier step do not fall into this one.

    >>> def step():
    ...     a = torch.empty(1000, dtype=torch.uint8)
    ...     b = torch.empty(2000, dtype=torch.uint8)
    ...     del a
    ...     return torch.empty(500, dtype=torch.uint8)
    >>> m = measure(step, device="cpu")
    >>> m.peak_bytes, m.end_bytes
    (3000, 500)
    """
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
    device = torch.device(device)
    match device.type:
        case "cpu":
            return _measure_cpu(step, warmup)
        case "cuda":
            return _measure_cuda(step, warmup, device)
        case other:
            raise ValueError(f"can't measure memory on {other!r}; device must be 'cpu' or 'cuda'")


def measure_each(prepare: Iterable[Callable[[], Callable[[], object]]]) -> list[Measurement]:
    """Measure many short CPU steps in one profile: starting and reading one takes some 0.1 s.

    Each of ``prepare`` returns the step that is to be measured; what it does itself does not count.

    >>> def prepare():
    ...     x = torch.ones(10)
    ...     return lambda: x.double().abs()
    >>> [(m.peak_bytes, m.end_bytes) for m in measure_each([prepare, prepare])]
    [(160, 80), (160, 80)]
    """
    durations_ns = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for make in prepare:
            step = make()
            _mark()
            start_ns = time.perf_counter_ns()
            result = step()
            durations_ns.append(time.perf_counter_ns() - start_ns)
            _mark()
            del result, step
    measured = _spans(_timeline(prof))[1::2]  # the others lie between two steps
    return [Measurement(p, e, ns) for (p, e), ns in zip(measured, durations_ns, strict=True)]


def _measure_cpu(step: Callable[[], object], warmup: int) -> Measurement:
    def prepare() -> Callable[[], object]:
        for _ in range(warmup):
            step()
        gc.collect()
        return step

    return measure_each([prepare])[0]


def _measure_cuda(step: Callable[[], object], warmup: int, device: torch.device) -> Measurement:
    for _ in range(warmup):
        step()
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start_ns = time.perf_counter_ns()
    result = step()
    torch.cuda.synchronize(device)
    duration_ns = time.perf_counter_ns() - start_ns
    peak = torch.cuda.max_memory_allocated(device) - before
    end = torch.cuda.memory_allocated(device) - before
    del result
    return Measurement(peak, end, duration_ns)


def _mark() -> None:
    """Leave a mark on the profiler's clock: here a measured step begins or ends."""
    with record_function(MARK):
        pass


def _timeline(prof: profile) -> list[Event]:
    """All allocations, frees and marks on the CPU, in the order of their times."""
    assert prof.profiler is not None
    results: Any = prof.profiler.kineto_results
    timeline: list[tuple[int, Event]] = []
    nodes = list(results.experimental_event_tree())
    for node in nodes:  # grows as it is read: siblings stay in order
        nodes.extend(node.children)
        if node.name == MARK:
            timeline.append((node.start_time_ns, None))
        elif node.name == MEMORY and node.extra_fields.device.type == "cpu":
            block = node.extra_fields
            timeline.append((node.start_time_ns, (block.ptr, block.alloc_size)))
    return [event for _, event in sorted(timeline, key=lambda timed: timed[0])]


def _spans(timeline: Iterable[Event]) -> list[tuple[int, int]]:
    """From the start, and from each mark, to the next mark: how far live bytes rose, peak and end.

    A free counts with the bytes seen allocated at its address. One of an unseen block does not:
    the allocator keeps sizes from earlier profiles, and the address may have a new owner since.
    """
    alive: dict[int, int] = {}
    live = base = peak = 0
    spans = []
    for event in timeline:
        if event is None:
            spans.append((peak - base, live - base))
            base = peak = live
            continue
        address, size = event
        if size > 0:
            alive[address] = size
            live += size
            peak = max(peak, live)
        else:
            live -= alive.pop(address, 0)
    return spans
