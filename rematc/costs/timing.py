"""Time an op alone on made-up data: the median of several runs after a first one that does not count.

In the step an op's inputs may have left the processor's caches, and other ops may be at work. Nothing is
done about that: benchmarks/overhead.py shows how far the sum of such times is from a step's.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch

from rematc import compat
from rematc.costs.call import Call
from rematc.costs.made_up import arguments, check_room, may_run
from rematc.costs.stopwatch import cuda_ns

log = logging.getLogger(__name__)
RUNS = 7
ENOUGH_S = 0.2  # for one op: with fewer runs the median of those that there were
SLOW_S = 2.0  # an op expected to take longer is not timed


def timings(calls: Iterable[tuple[Call, int]], limit_s: float) -> dict[Hashable, int]:
    """Nanoseconds by the key of a call, as many as can be timed in ``limit_s`` seconds, in the order given.

    Each call comes with the nanoseconds that it is expected to take: what would take too long, has
    effects, or refuses made-up data (out of memory among it) is left out, which the log says.
    """
    found: dict[Hashable, int] = {}
    end = time.monotonic() + limit_s
    with _undisturbed():
        for call, expected_ns in calls:
            left_s = end - time.monotonic()
            if left_s <= 0:
                log.info("%d ops timed, no time left: the others' costs are by roofline", len(found))
                break
            if not may_run(call) or expected_ns / 1e9 > min(SLOW_S, left_s):
                continue
            try:
                found[call.key] = _median_ns(call)
            except Exception as e:
                log.info("%s can't be timed (%s): its cost is by roofline", call.target, e)
    return found


@contextmanager
def _undisturbed() -> Iterator[None]:
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with compat.real_tensors(), torch.random.fork_rng(devices=cuda):
        yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what was made up is of sizes that the step may not ask for


def _median_ns(call: Call) -> int:
    check_room(call)
    args, kwargs = arguments(call)
    device = next((t.device for t in call.tensors() if t.is_cuda), None)

    def run() -> object:
        return call.target(*args, **kwargs)

    def once() -> float:
        return _cpu_ns(run) if device is None else cuda_ns(run, device)

    start = time.monotonic()
    once()
    taken: list[float] = []
    while len(taken) < RUNS and (not taken or time.monotonic() - start < ENOUGH_S):
        taken.append(once())
    return max(1, int(statistics.median(taken)))


def _cpu_ns(run: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    run()
    return time.perf_counter_ns() - start
