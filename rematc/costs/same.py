"""Does an op compute the same of the same numbers where these lie otherwise in memory?

Autograd has what some kernels read made contiguous first, as that of a `group_norm`, and these take it for
granted. A trace leaves that out where it has what is read contiguous already, and may be wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.costs.call import Call
from rematc.costs.made_up import check_room, may_run, undrawn
from rematc.storages import tensors

log = logging.getLogger(__name__)
ROOM = 8  # times the arguments: they are there twice, results three times, and what compares them
ROUNDING = 1e-3  # of the largest number, or a few of the steps of its dtype: sums in another order


def computes_the_same(call: Call, other: Call) -> bool:
    """``other`` is the same op on tensors of the same shapes and other strides; both run on made-up data.

    Results that are not even the same of the same call are left out: what is drawn is other numbers in each
    order of memory, as in eager PyTorch, and some memory is not written. False for what can't be run here.

    >>> x = torch.empty(1, 4, 2, 2)
    >>> computes_the_same(*(Call(torch.ops.aten.sin.default, (y,), {}) for y in (x, x.mT)))
    True
    """
    if not may_run(call) or not compat.is_overload(call.target):
        return False
    on_cuda = {t.device for t in call.tensors() if t.device.type == "cuda"}
    try:
        with compat.real_tensors(), torch.random.fork_rng(devices=on_cuda):
            if on_cuda:  # libraries keep memory for each thread that calls them
                return _same(call, other)
            with ThreadPoolExecutor(1) as apart:  # whoever profiles this thread sees nothing of it
                return apart.submit(_same, call, other).result()
    except Exception as e:
        level = logging.WARNING if isinstance(e, MemoryError | torch.OutOfMemoryError) else logging.INFO
        log.log(level, "%s gets copies of what lies otherwise than in the trace (%s)", call.target, e)
        return False


def _same(call: Call, other: Call) -> bool:
    check_room(call, ROOM)
    args, kwargs = _numbered(undrawn(call))
    lying = tensors((other.args, other.kwargs))
    args_there, kwargs_there = fx.node.map_aggregate((args, kwargs), lambda x: _lying_as(x, lying))
    first, again = (list(tensors(call.target(*args, **kwargs))) for _ in range(2))
    there = list(tensors(call.target(*args_there, **kwargs_there)))
    return all(_are_close(a, c) for a, b, c in zip(first, again, there, strict=True) if _are_close(a, b))


def _numbered(values: Any) -> Any:
    """Numbers that rise with their places, in place of ones: sums of others differ."""
    for n, t in enumerate(tensors(values)):
        if (t.dtype.is_floating_point or t.dtype.is_complex) and all(t.stride()):
            t.copy_(torch.linspace(0.25, 1.25 + n, t.numel(), device=t.device).view(t.shape))
    return values


def _lying_as(ours: Any, lying: Iterator[torch.Tensor]) -> Any:
    """The numbers of ``ours`` in memory as the next of ``lying``; what is expanded there is so here."""
    if not isinstance(ours, torch.Tensor):
        return ours
    strides = [compat.hint(s) for s in next(lying).stride()]
    once = ours[tuple(slice(None) if s else slice(1) for s in strides)]
    moved = torch.empty_strided(once.shape, strides, dtype=ours.dtype, device=ours.device).copy_(once)
    return moved.expand(ours.shape)


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return torch.equal(a, b)
    rounding = max(ROUNDING, 4 * torch.finfo(a.dtype).eps)
    a, b = (x.float() if x.dtype.itemsize < 4 else x for x in (a, b))
    is_number = a.isfinite()
    if not a.numel() or not torch.equal(is_number, b.isfinite()):
        return not a.numel()
    a, b = a.where(is_number, 0), b.where(is_number, 0)
    return bool((a - b).abs().max() <= rounding * a.abs().max())
