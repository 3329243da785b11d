"""What an op allocates besides its results, found by running it once on made-up data.

Kernels take scratch memory that no schema shows (a cast input, a column buffer, per-thread sums).
It is alive only while the op runs, but it counts toward the peak.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import pin_of
from rematc.measure import measure_each

log = logging.getLogger(__name__)


def workspaces(nodes: dict[Hashable, fx.Node]) -> dict[Hashable, int]:
    """Workspace bytes by key: each node's op is run on the device that its values are on.

    What can't be run here (collectives, ops with effects) or refuses made-up data counts 0, which
    the log says.
    """
    if compat.profiler_is_active():
        log.warning("compiling under a profiler: workspaces can't be measured, and the peak may be higher")
        return {}
    with compat.real_tensors(), torch.random.fork_rng():
        runs = {key: node for key, node in nodes.items() if _may_run(node)}
        measured = measure_each([partial(_run, node) for node in runs.values()])
    return {key: m.peak_bytes - m.end_bytes for key, m in zip(runs, measured, strict=True)}


def _may_run(node: fx.Node) -> bool:
    return compat.is_overload(node.target) and pin_of(node) in (None, "random", "mutates")


def _run(node: fx.Node) -> Callable[[], object]:
    """Make the arguments, run once (a first run may set up what later ones keep), return a second run."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: made_up(n.meta.get("val")))
    target: Any = node.target
    try:
        target(*args, **kwargs)
    except Exception as e:
        log.info("the workspace of %s can't be measured (%s); taken as 0", node.target, e)
        return lambda: None
    return lambda: target(*args, **kwargs)


def made_up(val: Any) -> Any:
    """A real tensor like the fake one ``val``: ones, or zeros where the numbers may be indices."""
    if compat.is_symbolic(val):
        return compat.hint(val)
    if not isinstance(val, torch.Tensor):
        return [made_up(v) for v in val] if isinstance(val, list | tuple) else val
    size, stride = ([compat.hint(x) for x in xs] for xs in (val.shape, val.stride()))
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    fill = torch.ones if val.dtype.is_floating_point or val.dtype.is_complex else torch.zeros
    return torch.as_strided(fill(span, dtype=val.dtype, device=val.device), size, stride)
