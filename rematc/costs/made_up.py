"""Made-up data to run an op on: what it takes to run one alone, on tensors like those of the trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rematc import compat
from rematc.capture import PURE_NAMESPACES, is_symbolic
from rematc.costs.call import Call


def may_run(call: Call) -> bool:
    """Has the op no effect beyond its results, as far as its namespace says?"""
    return compat.is_overload(call.target) and call.target.namespace in PURE_NAMESPACES


def made_up(vals: Any) -> Any:
    """``vals``, tensors and collections of them, as real ones: ones, or zeros where they may be indices."""
    return fx.node.map_aggregate(vals, _one)


def _one(val: Any) -> Any:
    if is_symbolic(val):
        return compat.hint(val)
    if not isinstance(val, torch.Tensor):
        return val
    size, stride = ([compat.hint(x) for x in xs] for xs in (val.shape, val.stride()))
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    fill = torch.ones if val.dtype.is_floating_point or val.dtype.is_complex else torch.zeros
    return torch.as_strided(fill(span, dtype=val.dtype, device=val.device), size, stride)
