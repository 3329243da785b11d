"""The tensors among values, and the storages that they stand in: memory is counted in those."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rematc import compat


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``values``: one, or lists, tuples and dicts of them and of other things.

    >>> x = torch.ones(2)
    >>> [t is x for t in tensors([x, None, (3, {"a": x})])]
    [True, True]
    """
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, dict):
        yield from tensors(list(values.values()))


def storages(values: Any) -> Iterator[tuple[int, int]]:
    """Key and bytes of the storage of each tensor in ``values``, fake ones included.

    >>> x = torch.ones(4)
    >>> dict(storages([x, x[:2]])).values()
    dict_values([16])
    """
    for tensor in tensors(values):
        yield compat.storage_of(tensor)


def lie_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Has each number its place in both, of one shape? Strides of dimensions of size 1 lead nowhere.

    >>> x = torch.ones(2, 1, 3)
    >>> lie_alike(x, x.as_strided((2, 1, 3), (3, 1, 1))), lie_alike(x, x.as_strided((2, 1, 3), (1, 6, 2)))
    (True, False)
    """
    steps = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(compat.hint(a) == compat.hint(b) for size, a, b in steps if compat.hint(size) > 1)


class Followed:
    """The storages of ``values`` of ``least_bytes`` at least, for as long as somebody has them.

    Those with a key in ``others`` are left out.

    >>> x, y = torch.ones(4), torch.ones(2)
    >>> followed = Followed([x, y])
    >>> del x
    >>> followed.live_bytes()
    8
    """

    def __init__(self, values: Any, others: Container[int] = (), least_bytes: int = 0) -> None:
        found = {compat.storage_key(t): t.untyped_storage() for t in tensors(values)}
        self._known = {
            key: (StorageWeakRef(storage), storage.nbytes())
            for key, storage in found.items()
            if key not in others and storage.nbytes() >= least_bytes
        }

    def live_bytes(self, others: Container[int] = ()) -> int:
        """Of those that are still there, and not among ``others``."""
        known = self._known.items()
        return sum(size for key, (ref, size) in known if key not in others and not ref.expired())


def fake_mode_of(tensors: Iterable[Any]) -> AbstractContextManager[Any]:
    """The mode that made the first fake tensor among ``tensors``, or one in which tensors have no memory."""
    modes = (getattr(t, "fake_mode", None) for t in tensors)
    return next((m for m in modes if m is not None), None) or compat.fake_tensors()
