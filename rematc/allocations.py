"""What the profiler tells of the CPU's allocator: allocations and frees, and how far live bytes rose.

Each event has its address. Of a block that was allocated before the profiler ran, the size is not known.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rematc import compat
from rematc.versions import torch_version

MEMORY = "[memory]"  # how the profiler names an allocation or a free
MARK = "rematc: a span of allocations begins or ends"

FORWARD, BACKWARD = "forward", "backward"

Event = tuple[int, int] | None  # (address, bytes; below zero for a free), or a mark
Span = tuple[int, int]  # bytes above those at its beginning: the most, and at its end


def memory_profile() -> profile:
    """A profile of the CPU's allocations; it does not write to the terminal, as torch's do."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when the first one of the process starts
    warns = torch_version() < (2, 13)  # unless it works out all events in Python: that takes longest
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=warns)


def mark() -> None:
    """Put a mark on the profiler's clock."""
    with record_function(MARK):
        pass


def timeline(prof: profile) -> list[Event]:
    """All allocations, frees and marks on the CPU, in the order of their times."""
    assert prof.profiler is not None
    results: Any = prof.profiler.kineto_results
    found: list[tuple[int, Event]] = []
    nodes = list(results.experimental_event_tree())
    for node in nodes:  # grows as it is read: siblings stay in order
        nodes.extend(node.children)
        if node.name == MARK:
            found.append((node.start_time_ns, None))
        elif node.name == MEMORY and node.extra_fields.device.type == "cpu":
            block = node.extra_fields
            found.append((node.start_time_ns, (block.ptr, block.alloc_size)))
    return [event for _, event in sorted(found, key=lambda timed: timed[0])]


def spans(events: Iterable[Event], *, every: int = 1) -> list[Span]:
    """From the start, and from each mark, to the next mark: how far live bytes rose, peak and end.

    A free counts with the bytes seen allocated at its address. One of an unseen block does not:
    the allocator keeps sizes from earlier profiles, and the address may have a new owner since. With
    ``every=2`` it is the first span, the third, and so on; what was allocated in the others is unseen too.
    """
    alive: dict[int, int] = {}
    live = base = peak = number = 0
    found = []
    for event in events:
        if event is None:
            if number % every == 0:
                found.append((peak - base, live - base))
            number, base, peak = number + 1, live, live
            continue
        address, size = event
        live -= alive.pop(
            address, 0
        )  # which is free, too, when it is given out: another thread freed it, unseen
        if size >= 0 and number % every == 0:
            alive[address] = size
            live += size
            peak = max(peak, live)
    return found


@contextmanager
def backward_passes(begin: Callable[[str], None]) -> Iterator[None]:
    """Say `BACKWARD` when autograd begins a backward pass, `FORWARD` once it is through.

    Passes within one do not count.
    """
    depth = 0

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable  # not what is watched, nor the watching
        @wraps(run)
        def running(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if compat.is_traced():  # a compiler looks what it would do: nothing runs
                return run(*args, **kwargs)
            depth += 1
            if depth == 1:
                begin(BACKWARD)
            try:
                return run(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    begin(FORWARD)

        return running

    autograd = torch.autograd
    with (
        mock.patch.object(autograd, "backward", watched(autograd.backward)),
        mock.patch.object(autograd, "grad", watched(autograd.grad)),
    ):
        yield


def profiler_is_taken() -> bool:
    """Is it active, or was a profile begun and not ended? In its warm-up it is not active yet."""
    if compat.profiler_is_active():
        return True
    profiles = [o for o in gc.get_objects() if type(o) is torch.autograd.profiler.profile]
    return any(p.entered and p.kineto_results is None for p in profiles)
