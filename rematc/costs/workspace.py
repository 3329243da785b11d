"""What an op allocates besides its results, found by running it once on made-up data.

Kernels take scratch memory that no schema shows (a cast input, a column buffer, per-thread sums).
It is alive only while the op runs, but it counts toward the peak.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch

from rematc import compat
from rematc.allocations import profiler_is_taken
from rematc.capture import is_collective
from rematc.costs.call import Call
from rematc.costs.made_up import check_room, made_up, may_run
from rematc.measure import measure_each

log = logging.getLogger(__name__)


def workspaces(calls: Iterable[Call]) -> dict[Hashable, int]:
    """Workspace bytes by the key of a call; each distinct one is made on the device of its tensors.

    What can't be run here (collectives, ops with effects or graphs of their own) or refuses made-up data
    counts 0, which the log says.
    """
    if profiler_is_taken():
        log.warning("compiling under a profiler: workspaces can't be measured, and the peak may be higher")
        return {}
    with compat.real_tensors(), torch.random.fork_rng():
        runs = {call.key: call for call in calls if may_run(call)}
        measured = measure_each([partial(_run, call) for call in runs.values()])
    return {key: m.peak_bytes - m.end_bytes for key, m in zip(runs, measured, strict=True)}


def stays_unknown(call: Call) -> bool:
    """May it take much that nobody can find out? Collectives take little beside what they are given."""
    if compat.is_higher_order(call.target):
        return True
    return compat.is_overload(call.target) and not may_run(call) and not is_collective(call.target)


def _run(call: Call) -> Callable[[], object]:
    """Make the arguments, run once (a first run may set up what later ones keep), return a second run."""
    target = call.target
    try:
        check_room(call)
        args, kwargs = made_up((call.args, call.kwargs))
        target(*args, **kwargs)
    except Exception as e:
        level = logging.WARNING if isinstance(e, MemoryError) else logging.INFO
        log.log(level, "the workspace of %s can't be measured (%s); taken as 0", target, e)
        return lambda: None
    return lambda: target(*args, **kwargs)
