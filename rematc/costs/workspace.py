"""What an op allocates besides its results, found by running it once on made-up data.

Kernels take scratch memory that no schema shows (a cast input, a column buffer, per-thread sums).
It is alive only while the op runs, but it counts toward the peak.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import PURE_NAMESPACES, is_symbolic
from rematc.costs.call import Call
from rematc.measure import measure_each

log = logging.getLogger(__name__)


def workspaces(calls: Iterable[Call]) -> dict[Hashable, int]:
    """Workspace bytes by the key of a call; each distinct one is made on the device of its tensors.

    What can't be run here (collectives, ops with effects) or refuses made-up data counts 0, which
    the log says.
    """
    if compat.profiler_is_active():
        log.warning("compiling under a profiler: workspaces can't be measured, and the peak may be higher")
        return {}
    with compat.real_tensors(), torch.random.fork_rng():
        runs = {call.key: call for call in calls if _may_run(call)}
        measured = measure_each([partial(_run, call) for call in runs.values()])
    return {key: m.peak_bytes - m.end_bytes for key, m in zip(runs, measured, strict=True)}


def _may_run(call: Call) -> bool:
    return compat.is_overload(call.target) and call.target.namespace in PURE_NAMESPACES


def _run(call: Call) -> Callable[[], object]:
    """Make the arguments, run once (a first run may set up what later ones keep), return a second run."""
    args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), made_up)
    target = call.target
    try:
        target(*args, **kwargs)
    except Exception as e:
        log.info("the workspace of %s can't be measured (%s); taken as 0", target, e)
        return lambda: None
    return lambda: target(*args, **kwargs)


def made_up(val: Any) -> Any:
    """A real tensor like the fake one ``val``: ones, or zeros where the numbers may be indices."""
    if is_symbolic(val):
        return compat.hint(val)
    if not isinstance(val, torch.Tensor):
        return val
    size, stride = ([compat.hint(x) for x in xs] for xs in (val.shape, val.stride()))
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    fill = torch.ones if val.dtype.is_floating_point or val.dtype.is_complex else torch.zeros
    return torch.as_strided(fill(span, dtype=val.dtype, device=val.device), size, stride)
