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
from rematc.costs.made_up import arguments, check_room, may_run
from rematc.storages import tensors

log = logging.getLogger(__name__)
ROUNDING = 0.02  # of the largest number: sums of half precision in another order


def computes_the_same(call: Call, other: Call) -> bool:
    """``other`` is the same op on tensors of the same shapes and other strides; both run on made-up data.

    What draws random numbers does, if it runs: it has others in each order of memory, as in eager PyTorch.
    False for what can't be run here.

    >>> x = torch.empty(1, 4, 2, 2)
    >>> computes_the_same(*(Call(torch.ops.aten.sin.default, (y,), {}) for y in (x, x.mT)))
    True
    """
    if not may_run(call) or not compat.is_overload(call.target):
        return False
    on_cuda = {t.device for t in call.tensors() if t.device.type == "cuda"}
    with compat.real_tensors(), torch.random.fork_rng(devices=on_cuda), ThreadPoolExecutor(1) as apart:
        return apart.submit(_same, call, other).result()  # whoever profiles this thread sees nothing of it


def _same(call: Call, other: Call) -> bool:
    try:
        check_room(call)
        args, kwargs = _numbered(arguments(call))
        lying = tensors((other.args, other.kwargs))
        args_there, kwargs_there = fx.node.map_aggregate((args, kwargs), lambda x: _lying_as(x, lying))
        results = list(tensors(call.target(*args, **kwargs)))
        there = list(tensors(call.target(*args_there, **kwargs_there)))
        is_random = torch.Tag.nondeterministic_seeded in call.target.tags
        return is_random or all(map(_are_close, results, there))
    except Exception as e:
        log.info("%s does not run on what lies otherwise than in the trace: %s", call.target, e)
        return False


def _numbered(values: Any) -> Any:
    """Real numbers in place of ones: no two the same."""
    make = torch.Generator().manual_seed(0)
    for t in tensors(values):
        if t.dtype.is_floating_point and all(t.stride()):
            t.copy_(torch.rand(t.shape, generator=make))
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
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    return not a.numel() or bool((a - b).abs().max() <= ROUNDING * a.abs().max())
