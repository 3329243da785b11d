"""To look for garbage again and again among the millions of objects of a lowering takes a fifth of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Inside, garbage that refers to itself is not looked for; where that is off already, it stays off.

    Graphs are such garbage: of one lowering of a model of 32 layers they are some hundred megabytes.

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
