"""How much more an allocator gives than it is asked for. Nothing of torch is loaded.

CUDA's caching allocator gives multiples of 512 bytes. From 10 MiB on it asks the driver for multiples of
2 MiB, and what is left over of that is cut off only if it is more than 1 MiB: a tensor of 25 MiB takes 26, in
each of the layers that keeps one. With expandable segments everything is cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rounding = Callable[[int], int]

UNIT, LARGE, SEGMENT, UNCUT = 512, 10 << 20, 2 << 20, 1 << 20


def exactly(size: int) -> int:
    """As on a CPU."""
    return size


def in_units(size: int) -> int:
    """As CUDA's allocator with expandable segments.

    >>> in_units(513)
    1024
    """
    return _up(size, UNIT)


def as_cuda(size: int) -> int:
    """As CUDA's allocator: at the least, what it gives where it has nothing to use again.

    >>> [as_cuda(n << 20) >> 20 for n in (9, 25, 26, 27)], as_cuda((25 << 20) - 512)
    ([9, 26, 26, 28], 26213888)
    """
    size = in_units(size)
    whole = _up(size, SEGMENT)
    return whole if size >= LARGE and whole - size <= UNCUT else size


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def given_bytes(tensor: Any) -> int:
    """What the allocator of its device gives for a tensor of such a size.

    >>> import torch
    >>> given_bytes(torch.ones(3))
    12
    """
    size = int(tensor.numel() * tensor.element_size())
    return as_cuda(size) if tensor.is_cuda else size
