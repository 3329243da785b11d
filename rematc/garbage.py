"""Garbage is not looked for among the millions of objects of a lowering, or of a search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Inside, garbage that refers to itself is not looked for; where that is off already, it stays off.

    It takes a fifth of a lowering. Graphs are such garbage: of one lowering of a model of 32 layers they are
    some hundred megabytes.

    >>> with garbage_waits():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
