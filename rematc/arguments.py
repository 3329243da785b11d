"""The arguments of one call of a graph, looked at once: there are hundreds, and it is done in each step.

Most are parameters and buffers, the same tensors in each call: what is known of those is not asked again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rematc import compat
from rematc.storages import storages

PLAIN = (torch.Tensor, torch.nn.Parameter)  # a subclass may have no memory
IDLE = 16  # calls from one look to the next, as long as nothing comes again: models may run in turns


class Known:
    """Which arguments are the same tensors from call to call, and the storages of those.

    They are known by weak references, and found out from one look at all arguments to the next; there is one
    where any is another, or was given other memory, as by ``w.data = ...``. ``places`` are theirs among the
    arguments, ``trained`` those of them with gradients, and ``others`` all other places. Whether one has
    gradients is not asked again: code is compiled for that, and Dynamo guards it.

    >>> w, known = torch.nn.Parameter(torch.ones(4)), Known()
    >>> known.looked_at((w, torch.ones(2))).places, known.looked_at((w, torch.ones(3))).places
    ([0, 1], [0])
    """

    def __init__(self) -> None:
        self.places: list[int] = []
        self.trained: list[int] = []
        self.others: list[int] = []
        self.refs: list[weakref.ref[torch.Tensor]] = []  # to the trained ones
        self.storages: dict[int, int] = {}
        self.cuda: torch.device | None = None
        self._last: dict[int, weakref.ref[torch.Tensor]] = {}  # all that might be the same, at the last look
        self._which: list[weakref.ref[torch.Tensor]] = []
        self._at: list[int] = []  # where their memory is
        self._there: list[int] = []  # their storages: once one is gone, another may be at its place
        self._kept: list[StorageWeakRef] = []  # so that those numbers are no others'
        self._count = -1
        self._wait: float = math.inf  # calls until the next look that is due anyway

    def looked_at(self, values: tuple[Any, ...]) -> Known:
        """Itself, once it is right for ``values``."""
        self._wait -= 1
        if self._wait <= 0 or not self._holds(values):
            self._look(values)
        return self

    def _holds(self, values: tuple[Any, ...]) -> bool:
        """Are they what they were, where they were?"""
        same = [values[n] for n in self.places] if len(values) == self._count else None
        return (
            same is not None
            and all(map(is_, [ref() for ref in self._which], same))
            and [*map(torch.Tensor.data_ptr, same)] == self._at
            and not compat.any_gone(self._there)
        )

    def _look(self, values: tuple[Any, ...]) -> None:
        """Those are the same that were there at the last look too; at the first, all are taken to be.

        Where those are others now, as with another model, the next call is looked at as well.
        """
        is_first, before = len(values) != self._count, self._last
        last = {n: weakref.ref(value) for n, value in enumerate(values) if _stays(value)}
        places = [n for n in last if is_first or (n in before and before[n]() is values[n])]
        same = [values[n] for n in places]
        kept = [StorageWeakRef(t.untyped_storage()) for t in same]
        self.storages = dict(storages(same))
        self.trained = [n for n in places if values[n].requires_grad]
        self.others = sorted(set(range(len(values))).difference(places))
        self.cuda = next((t.device for t in same if t.is_cuda), None)
        self.refs = [last[n] for n in self.trained]
        self._which, self._at = [last[n] for n in places], [*map(torch.Tensor.data_ptr, same)]
        self._there, self._kept = [storage.cdata for storage in kept], kept
        is_other = not is_first and places != self.places
        self._wait = 1 if is_other else math.inf if places else IDLE
        self.places, self._last, self._count = places, last, len(values)


def _stays(value: Any) -> bool:
    """May it be the same in the next call, with all that can be said of it?"""
    return (
        type(value) in PLAIN
        and value.is_leaf
        and (type(value) is not torch.Tensor or not value.requires_grad)
    )


class Arguments:
    """``tensors`` of ``values``; those that have gradients are ``trained``, of them ``leaves`` keep theirs.

    What is ``known`` from other calls is not asked again; if ``is_plain``, all that is trained is known, and
    on a CPU.

    >>> w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> given = Arguments((w, x, 3, w * x))
    >>> len(given.tensors), len(given.trained), len(given.leaves), list(given.storages.values())
    (3, 2, 1, [8, 8, 8])
    """

    def __init__(self, values: tuple[Any, ...], known: Known | None = None) -> None:
        self.values = values
        self._known = (Known() if known is None else known).looked_at(values)
        self._others = [values[n] for n in self._known.others if isinstance(values[n], torch.Tensor)]
        self.trained: Sequence[torch.Tensor] = [values[n] for n in self._known.trained]
        self.leaves = self.trained
        self.is_plain = not (self._known.cuda or any([t.requires_grad or t.is_cuda for t in self._others]))
        if not self.is_plain and any(t.requires_grad for t in self._others):  # in order, as gradients are
            self.trained = [t for t in self.tensors if t.requires_grad]
            self.leaves = [t for t in self.trained if t.is_leaf]

    @property
    def refs(self) -> Sequence[weakref.ref[torch.Tensor]]:
        """To the leaves."""
        return self._known.refs if self.is_plain else [*map(weakref.ref, self.leaves)]

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """In order."""
        return [v for v in self.values if isinstance(v, torch.Tensor)]

    @cached_property
    def storages(self) -> dict[int, int]:
        """Their bytes by their keys."""
        return {**self._known.storages, **dict(map(compat.storage_of, self._others))}

    @cached_property
    def cuda(self) -> torch.device | None:
        """A CUDA device that they are on, if any is."""
        return self._known.cuda or next((t.device for t in self._others if t.is_cuda), None)

    @property
    def are_from_eager_code(self) -> bool:
        """Was any of them computed eagerly, on a CPU, from what is trained?"""
        if len(self.leaves) == len(self.trained):
            return False
        made = (t for t in self.trained if t.grad_fn is not None and not t.is_cuda)
        return any("Compiled" not in type(t.grad_fn).__name__ for t in made)
