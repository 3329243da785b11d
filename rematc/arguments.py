"""The arguments of one call of a graph, looked at once: there are hundreds, and it is done in each step."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from rematc.storages import Known, storages


class Arguments:
    """``tensors`` of ``values``; those that have gradients are ``trained``, of them ``leaves`` keep theirs.

    Storages that are ``known`` from other calls are not asked again.

    >>> w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> given = Arguments((w, x, 3, w * x))
    >>> len(given.tensors), len(given.trained), len(given.leaves), list(given.storages.values())
    (3, 2, 1, [8, 8, 8])
    """

    def __init__(self, values: tuple[Any, ...], known: Known | None = None) -> None:
        self.values = values
        self._known = Known() if known is None else known
        self.tensors = [v for v in values if isinstance(v, torch.Tensor)]
        self.trained = [t for t in self.tensors if t.requires_grad]
        self.leaves = [t for t in self.trained if t.is_leaf]

    @cached_property
    def storages(self) -> dict[int, int]:
        """Their bytes by their keys."""
        kept = [t for t in self.leaves if type(t) is torch.nn.Parameter]  # a subclass may have no memory
        numbers = set(map(id, kept))
        others = [t for t in self.tensors if id(t) not in numbers]
        return {**self._known.storages(kept), **dict(storages(others))}

    @cached_property
    def cuda(self) -> torch.device | None:
        """The CUDA device that they are on, if any is."""
        return next((t.device for t in self.tensors if t.is_cuda), None)

    @property
    def are_from_eager_code(self) -> bool:
        """Was any of them computed eagerly, on a CPU, from what is trained?"""
        if len(self.leaves) == len(self.trained):
            return False
        made = (t for t in self.trained if t.grad_fn is not None and not t.is_cuda)
        return any("Compiled" not in type(t.grad_fn).__name__ for t in made)
