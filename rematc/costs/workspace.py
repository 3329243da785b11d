"""What an op allocates besides its results, and for them, found by running it on made-up data.

Kernels take scratch memory that no schema shows (a cast input, a column buffer, per-thread sums).
It is alive only while the op runs, but it counts toward the peak. And some return their result in
memory that they needed before: the mean of an `mse_loss` in that of all the losses. How results lie in
memory is seen on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from rematc import compat
from rematc.capture import is_collective
from rematc.costs.call import Call
from rematc.costs.made_up import arguments, check_room, may_run
from rematc.highest import forget
from rematc.rounding import as_cuda
from rematc.storages import tensors

log = logging.getLogger(__name__)


Layouts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Taken(NamedTuple):
    """Bytes that a call takes, beside its results while it runs and for them, and how those lie in memory.

    ``layouts``: the shape and the strides of each tensor that it returns; empty where that was not seen.
    """

    workspace_bytes: int
    result_bytes: int
    layouts: Layouts = ()


class _Prepared(NamedTuple):
    """A call that has run once, to be run again: a first run may set up what later ones keep."""

    step: Callable[[], object] = lambda: None
    layouts: Layouts = ()


def taken(calls: Iterable[Call]) -> dict[Hashable, Taken]:
    """What calls take, by their keys; each distinct one is made on the device of its tensors.

    What can't be run here (collectives, ops with effects or graphs of their own) or refuses made-up data
    counts 0, which the log says.
    """
    runs = {call.key: call for call in calls if may_run(call)}
    on_cuda = {key: device for key, call in runs.items() if (device := _cuda_device(call))}
    on_cpu = [key for key in runs if key not in on_cuda]
    with compat.real_tensors(), torch.random.fork_rng(devices=set(on_cuda.values())):
        found = {key: _on_cuda(partial(_run, runs[key]), device) for key, device in on_cuda.items()}
        with ThreadPoolExecutor(1) as apart:  # whoever profiles this thread sees nothing of it
            on_cpu_taken = apart.map(_on_cpu, (partial(_run, runs[key]) for key in on_cpu))
            found |= dict(zip(on_cpu, on_cpu_taken, strict=True))
    return found


def _on_cpu(prepare: Callable[[], _Prepared]) -> Taken:
    """As its allocator tells the thread that asks."""
    prepared = prepare()
    live = list(accumulate(compat.allocations(prepared.step), initial=0))
    return Taken(max(live) - live[-1], live[-1], prepared.layouts)


def _cuda_device(call: Call) -> torch.device | None:
    return next((t.device for t in call.tensors() if t.device.type == "cuda"), None)


def _on_cuda(prepare: Callable[[], _Prepared], device: torch.device) -> Taken:
    """As it asks the caching allocator, which may give more than that, by what is free at the time."""

    def asked(which: str) -> int:
        found: int = torch.cuda.memory_stats(device).get(f"requested_bytes.all.{which}", 0)
        return found

    prepared = prepare()
    forget(device)
    before = asked("current")
    result = prepared.step()
    peak, end = asked("peak"), asked("current")
    del result
    return Taken(as_cuda(peak - end), as_cuda(end - before), prepared.layouts)


def stays_unknown(call: Call) -> bool:
    """May it take much that nobody can find out? Collectives take little, Triton kernels nothing."""
    if compat.is_higher_order(call.target):
        return compat.started_kernel(call.target, call.kwargs) is None
    return compat.is_overload(call.target) and not may_run(call) and not is_collective(call.target)


def _run(call: Call) -> _Prepared:
    """Make the arguments, and run once."""
    target = call.target
    try:
        check_room(call)
        args, kwargs = arguments(call)
        results = list(tensors(target(*args, **kwargs)))
    except Exception as e:
        level = logging.WARNING if isinstance(e, MemoryError) else logging.INFO
        log.log(level, "the workspace of %s can't be measured (%s); taken as 0", target, e)
        return _Prepared()
    are_dense = all(t.layout == torch.strided for t in results)
    layouts = tuple((tuple(t.shape), t.stride()) for t in results) if are_dense else ()
    return _Prepared(lambda: target(*args, **kwargs), layouts)
