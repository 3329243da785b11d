"""The tensors among values, and the storages that they stand in: memory is counted in those."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

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
        yield compat.storage_key(tensor), compat.hint(tensor.untyped_storage().nbytes())
