"""`pure()`: what torch can't know of a custom op, and who wrote it can: that to run it again does no harm."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from rematc import compat
from rematc.errors import OptionError

T = TypeVar("T")
_DECLARED: set[Any] = set()  # overloads, and the functions that Triton kernels are made of


def pure(op: T) -> T:
    """Declare that ``op`` computes its results from its arguments and does nothing else: it may run again.

    A custom op may count its calls, draw random numbers, or talk to other processes; so rematc runs it once
    and saves what backward reads of it, unless it is declared here. ``op`` is what `torch.library.custom_op`
    made (so this can be a decorator above that one), ``torch.ops.namespace.name``, or a Triton kernel (what
    it writes into are its results; one that adds up by ``atomic_add`` may give other bits the next time, and
    is not pure); it is returned. The graphs that are compiled from then on know of it.

    Raises `OptionError` for what is none of these, for an op that says itself that it writes into its
    arguments or draws random numbers, and for one that `torch.library.triton_op` made: torch looks into it,
    so the kernels in it are what can be declared.

    >>> import rematc, torch
    >>> @rematc.pure
    ... @torch.library.custom_op("docs::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    """
    if compat.is_triton_op(op):
        raise OptionError(f"rematc.pure({op!r}): torch looks into a triton_op; give the Triton kernels in it")
    if kernel := compat.triton_kernel(op):
        _DECLARED.add(kernel)
        return op
    overloads = compat.overloads(op)
    if not overloads:
        raise OptionError(
            f"rematc.pure({op!r}): that is no op of torch; give what torch.library.custom_op returned, "
            "torch.ops.namespace.name, or a Triton kernel"
        )
    for overload in overloads:
        if compat.schema(overload).is_mutable:
            raise OptionError(f"rematc.pure({overload}): it writes into its arguments, so it runs once")
        if torch.Tag.nondeterministic_seeded in overload.tags:
            raise OptionError(f"rematc.pure({overload}): it draws random numbers, so it runs once")
    _DECLARED.update(overloads)
    return op


def is_declared(op: object) -> bool:
    """Was this overload, or the kernel that is made of this function, declared by `pure`?"""
    return op in _DECLARED
