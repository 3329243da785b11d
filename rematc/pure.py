"""`pure()`: what torch can't know of a custom op, and who wrote it can: that to run it again does no harm."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from rematc import compat
from rematc.errors import OptionError

T = TypeVar("T")
_DECLARED: set[Any] = set()  # overloads


def pure(op: T) -> T:
    """Declare that ``op`` computes its results from its arguments and does nothing else: it may run again.

    A custom op may count its calls, draw random numbers, or talk to other processes; so rematc runs it once
    and saves what backward reads of it, unless it is declared here. ``op`` is what `torch.library.custom_op`
    made (so this can be a decorator above that one), or ``torch.ops.namespace.name``; it is returned. The
    graphs that are compiled from then on know of it. A Triton kernel is declared by the op that wraps it.

    Raises `OptionError` for what is no op of torch, and for an op that says itself that it writes into its
    arguments or draws random numbers.

    >>> import rematc, torch
    >>> @rematc.pure
    ... @torch.library.custom_op("docs::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    """
    overloads = compat.overloads(op)
    if not overloads:
        raise OptionError(
            f"rematc.pure({op!r}): that is no op of torch; give what torch.library.custom_op returned, or "
            "torch.ops.namespace.name"
        )
    for overload in overloads:
        if overload._schema.is_mutable:
            raise OptionError(f"rematc.pure({overload}): it writes into its arguments, so it runs once")
        if torch.Tag.nondeterministic_seeded in overload.tags:
            raise OptionError(f"rematc.pure({overload}): it draws random numbers, so it runs once")
    _DECLARED.update(overloads)
    return op


def is_declared(overload: object) -> bool:
    """Was this overload declared by `pure`?"""
    return overload in _DECLARED
