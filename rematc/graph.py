"""The step as data: ops, the values they make, the storages those stand in. No torch.

Memory is counted in storages, not in values: a view is a second value on the same storage and
costs nothing, and a storage stays alive as long as any value on it is still read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Phase = Literal["forward", "backward"]
COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d"})  # namespaces of ops


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor value.

    ``storage`` indexes `Graph.storage_bytes`; two values with the same storage alias each other.

    >>> Value("relu", storage=3)
    Value(name='relu', storage=3)
    """

    name: str
    storage: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: reads the values ``inputs``, makes the values ``outputs`` (indices).

    ``pin`` says in words why the op may not run a second time ("random", "collective",
    "mutates", "effect"), or is None. ``needed`` says why the op must run in its phase even if
    nobody reads it ("mutates an input"), or is None. ``module`` is the module path it comes from.

    >>> Op("relu", "aten.relu.default", inputs=(0,), outputs=(1,)).pin is None
    True
    """

    name: str
    target: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase = "forward"
    pin: str | None = None
    needed: str | None = None
    module: str = ""


@dataclass(frozen=True)
class Graph:
    """A training step: forward ops, then backward ops, in the order in which they first run.

    ``inputs`` are there before the step and after it (parameters, buffers, the batch): their
    storages are *resident* and never counted. ``tangents`` arrive with the backward pass; those in
    ``held`` stay to its end, though nobody reads them any more. ``outputs`` are the forward results,
    which the caller holds to the end, and ``gradients`` the backward's.

    >>> tiny = Graph(
    ...     storage_bytes=(0, 8, 8, 4, 8),
    ...     values=tuple(Value(n, s) for s, n in enumerate(["x", "a", "b", "dy", "dx"])),
    ...     ops=(Op("f", "sin", (0,), (1,)), Op("g", "exp", (1,), (2,)),
    ...          Op("h", "mul", (1, 3), (4,), phase="backward")),
    ...     inputs=(0,), tangents=(3,), outputs=(2,), gradients=(4,))
    >>> tiny.forward_steps(saved=())
    (0, 1)
    """

    storage_bytes: tuple[int, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    held: tuple[int, ...] = ()

    @cached_property
    def producer(self) -> dict[int, int]:
        """Op index by the value that it makes."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    @cached_property
    def resident(self) -> frozenset[int]:
        """Storages that are there before and after the step."""
        return frozenset(self.values[v].storage for v in self.inputs)

    @cached_property
    def views(self) -> frozenset[int]:
        """Indices of the ops that do nothing but view what they read, and may be taken again anywhere."""
        return frozenset(i for i, op in enumerate(self.ops) if self._is_view(op))

    def made_bytes(self, op: int) -> int:
        """Bytes of the storages that it makes."""
        ends = self.ops[op].inputs, self.ops[op].outputs
        read, made = ({self.values[v].storage for v in values} for values in ends)
        return sum(self.storage_bytes[s] for s in made - read - self.resident)

    def _is_view(self, op: Op) -> bool:
        """Is all that it makes on one storage that it reads, or resident, and no other memory read?

        The sizes that a view is told are values of no bytes.
        """
        read, made = ({self.values[v].storage for v in values} for values in (op.inputs, op.outputs))
        others = {s for s in read - made - self.resident if self.storage_bytes[s]}
        is_on_one = made <= self.resident or (len(made) == 1 and made <= read)
        return not (op.pin or op.needed or others) and is_on_one

    @cached_property
    def makes_views_beside(self) -> bool:
        """Does an op that is more than a view put something on memory that it reads?"""
        more = (op for i, op in enumerate(self.ops) if i not in self.views)
        storages = (({self.values[v].storage for v in op.outputs}, op.inputs) for op in more)
        return any(made & {self.values[v].storage for v in read} - self.resident for made, read in storages)

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """Indices of all forward ops, in order."""
        return tuple(i for i, op in enumerate(self.ops) if op.phase == "forward")

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """Indices of all backward ops, in order."""
        return tuple(i for i, op in enumerate(self.ops) if op.phase == "backward")

    def ancestors(self, values: Iterable[int], stop: Iterable[int] = ()) -> frozenset[int]:
        """Indices of the ops needed to make ``values`` when the values ``stop`` are at hand."""
        at_hand, found = set(stop), set()
        stack = [v for v in values if v not in at_hand]
        while stack:
            op = self.producer.get(stack.pop())
            if op is not None and op not in found:
                found.add(op)
                stack.extend(v for v in self.ops[op].inputs if v not in at_hand)
        return frozenset(found)

    def forward_steps(self, saved: Iterable[int]) -> tuple[int, ...]:
        """The forward ops that run when ``saved`` is saved: all that outputs, effects and it need."""
        needed = [i for i in self.forward if self.ops[i].needed]
        roots = [*self.outputs, *saved, *(v for i in needed for v in self.ops[i].inputs)]
        run = self.ancestors(roots) | set(needed)
        return tuple(i for i in self.forward if i in run)

    @cached_property
    def backward_steps(self) -> tuple[int, ...]:
        """The backward ops that any plan runs: all that the gradients and effects need, in order."""
        needed = [i for i in self.backward if self.ops[i].needed]
        roots = [*self.gradients, *(v for i in needed for v in self.ops[i].inputs)]
        run = self.ancestors(roots) | set(needed)
        return tuple(i for i in self.backward if i in run)

    @cached_property
    def is_general(self) -> bool:
        """Has it no backward pass, and nothing that runs before one would?"""
        return not self.backward_steps and not self.forward_steps(())

    @cached_property
    def kept_in_order(self) -> tuple[tuple[int, int], ...]:
        """Pairs of backward ops of which the first stays before the second, whether or not that reads it.

        Ops that draw random numbers, write or have other effects (those with a ``pin`` or ``needed``) keep
        their order among each other. What such an op reads or makes it may also write, so all other ops on
        that memory stay on their side of it.
        """
        pairs: list[tuple[int, int]] = []
        latest: int | None = None
        writer: dict[int, int] = {}
        others: dict[int, list[int]] = {}
        for i in self.backward_steps:
            op = self.ops[i]
            touched = dict.fromkeys(self.values[v].storage for v in (*op.inputs, *op.outputs))
            pairs += [(writer[s], i) for s in touched if s in writer]
            if op.pin or op.needed:
                pairs += [(latest, i)] if latest is not None else []
                pairs += [(j, i) for s in touched for j in others.pop(s, ())]
                latest = i
                writer.update(dict.fromkeys(touched, i))
            else:
                for s in touched:
                    others.setdefault(s, []).append(i)
        return tuple(dict.fromkeys(pairs))
