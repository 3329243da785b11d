"""The graph of what is written: values that stay inside one of Inductor's kernels are none of its values.

Inductor decides what to fuse; here its decision for one split of the joint graph is read as a `Capture`. An
op makes one value (or one set of outputs) that is written to memory, with all that is computed on the
way from other written values. So a plan recomputes what a kernel would, and its memory counts what is
really written.

The split that is read has the plan of `rematc.baselines.min_cut`: pointwise ops that backward can compute
within its own kernels, from values that are there, are computed there in all plans. They cost no memory and
hardly any time. Those of them that forward writes anyway, as a product reads them, are ops like any other: a
plan saves them, or recomputes them as often as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rematc.capture import Capture
from rematc.graph import Graph, Op, Phase, Value
from rematc.mincut import is_cheap
from rematc.plan import Plan


class Kernel(NamedTuple):
    """The names of the FX nodes that a kernel computes; one that is ready-made computes nothing beside."""

    computes: tuple[str, ...]
    is_ready_made: bool = False


Kernels = tuple[Kernel, ...]


def fuse(captured: Capture, plan: Plan, forward: Kernels, backward: Kernels) -> Capture:
    """The graph whose values are those that the two lowered graphs of ``plan`` write.

    ``forward`` and ``backward`` have the kernels in order. A node in several kernels is computed by each. One
    in no kernel is a view, or something that Inductor made into something else, and written for certain.
    """
    saved = frozenset(plan.saved)
    steps = captured.graph.forward_steps(plan.saved)
    first = _Side(captured, "forward", steps, forward, saved)
    return _Fused(
        captured, first, _Side(captured, "backward", plan.backward, backward, saved, first)
    ).capture()


@dataclass(frozen=True)
class _Side:
    """One of the two lowered graphs: its steps, and which kernels they are in."""

    captured: Capture
    phase: Phase
    steps: tuple[int, ...]
    kernels: Kernels
    saved: frozenset[int]
    before: _Side | None = None

    @cached_property
    def producer(self) -> dict[int, int]:
        """The op by the value that it makes on this side."""
        made = {v: i for i in self.steps for v in self.captured.graph.ops[i].outputs}
        return made if self.before is None else {v: i for v, i in made.items() if v not in self.saved}

    @cached_property
    def homes(self) -> dict[int, list[int]]:
        """The kernels that compute each op, in order."""
        of = {node.name: i for i in self.steps for node in self.captured.nodes[i]}
        homes: dict[int, list[int]] = {}
        for k, kernel in enumerate(self.kernels):
            for i in dict.fromkeys(of[n] for n in kernel.computes if n in of):
                homes.setdefault(i, []).append(k)
        return homes

    @cached_property
    def written(self) -> frozenset[int]:
        """The ops whose results stand in memory: those that a kernel reads and does not compute itself."""
        graph = self.captured.graph
        ops, views = graph.ops, graph.views
        returned = {self.producer[v] for v in self._results if v in self.producer}
        found = returned | {
            i for i in self.steps if ops[i].needed or (i not in self.homes and i not in views)
        }
        found |= {i for reader in self.steps for i in self._read_from_memory(reader)}
        for i in reversed(self.steps):
            # Who reads a view takes it itself, of what is viewed: that is written, then.
            if i in found and i in views and i not in returned:
                found.remove(i)
                found |= {self.producer[v] for v in ops[i].inputs if v in self.producer}
        return frozenset(i for i in found if i in returned or not self._is_taken_along(i))

    @property
    def _results(self) -> tuple[int, ...]:
        graph = self.captured.graph
        return (*graph.outputs, *self.saved) if self.phase == "forward" else graph.gradients

    def _read_from_memory(self, reader: int) -> set[int]:
        """The ops whose results a kernel of ``reader`` reads and does not compute itself."""
        read = {self.producer[v] for v in self.captured.graph.ops[reader].inputs if v in self.producer}
        kernels = self.homes.get(reader, (-1,))
        return {i for i in read if any(k not in self.homes.get(i, ()) for k in kernels)}

    def _is_taken_along(self, op: int) -> bool:
        """Can each kernel that reads ``op``, which backward alone would write, compute it as well?"""
        if self.before is None or op in self.before.written or op not in self.homes:
            return False
        graph, readers = self.captured.graph, list(self._readers[op])
        for i in readers:  # grows
            if i in graph.views:
                readers += self._readers[i]
        kernels = [self.homes.get(i, [-1]) for i in readers if i not in graph.views]
        fused = {k for k, kernel in enumerate(self.kernels) if not kernel.is_ready_made}
        return graph.ops[op].phase == "forward" and fused.issuperset(k for ks in kernels for k in ks)

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {i: [] for i in self.steps}
        for i in self.steps:
            for v in self.captured.graph.ops[i].inputs:
                if v in self.producer:
                    readers[self.producer[v]].append(i)
        return readers

    def cone(self, op: int) -> tuple[list[int], tuple[int, ...]]:
        """The ops that compute ``op`` from written values, in order of steps, and the values they read."""
        graph, members, reads = self.captured.graph, {op}, dict[int, None]()
        stack = [op]
        while stack:
            for v in graph.ops[stack.pop()].inputs:
                i = self.producer.get(v)
                if i is None or i in self.written:
                    reads[v] = None
                elif i not in members:
                    members.add(i)
                    stack.append(i)
        return sorted(members, key=self.position.__getitem__), tuple(sorted(reads))

    @cached_property
    def position(self) -> dict[int, int]:
        return {i: n for n, i in enumerate(self.steps)}

    @cached_property
    def order(self) -> list[int]:
        """The written ops in the order of the kernels, each in time for the first kernel that reads it.

        Inductor folds an op away (x + 0), and one of its last kernels writes what that reads. If this waited
        for its kernel, so would all that depends on it by the graph, and a draw, which does not, ran before.
        """
        turns: dict[int, int] = {}
        turn = -1
        for i in sorted(self.written, key=self.position.__getitem__):
            turn = turns[i] = self.homes[i][0] if i in self.homes else turn
        for reader in reversed(turns):
            for i in (self.producer[v] for v in self.cone(reader)[1] if v in self.producer):
                turns[i] = min(turns[i], turns[reader])
        return sorted(turns, key=turns.__getitem__)


class _Fused:
    """Both sides as one graph."""

    def __init__(self, captured: Capture, forward: _Side, backward: _Side) -> None:
        self.captured, self.forward, self.backward = captured, forward, backward
        self.index: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.storage_bytes: list[int] = []
        self.values: list[Value] = []

    def capture(self) -> Capture:
        graph = self.captured.graph
        inputs, tangents = self._values(graph.inputs), self._values(graph.tangents)
        ops, nodes, kernels = [], [], []
        for side, i in self._written():
            members, reads = side.cone(i)
            ops.append(self._op(i, members, reads))
            nodes.append(tuple(n for m in members for n in self.captured.nodes[m]))
            kernels.append((side.phase, min(side.homes.get(i, ()), default=None)))
        fused = Graph(
            storage_bytes=tuple(self.storage_bytes),
            values=tuple(self.values),
            ops=tuple(ops),
            inputs=inputs,
            tangents=tangents,
            outputs=self._values(graph.outputs),
            gradients=self._values(graph.gradients),
            held=self._values(graph.held),
        )
        value_nodes = tuple(self.captured.value_nodes[value] for value in self.index)
        return Capture(fused, tuple(nodes), value_nodes, self.captured.gradient_nodes, tuple(kernels))

    def _written(self) -> Iterator[tuple[_Side, int]]:
        """Forward's ops as it computes them; then what only backward needs of forward, and backward's own."""
        ops, here = self.captured.graph.ops, self.backward.order
        yield from ((self.forward, i) for i in self.forward.order)
        wanted: set[int] = set()
        for i in reversed(here):
            if ops[i].phase == "backward" or (i in wanted and i not in self.forward.written):
                reads = (v for v in self.backward.cone(i)[1] if v in self.backward.producer)
                wanted.update(self.backward.producer[v] for v in reads)
        late = [i for i in here if i in wanted and ops[i].phase == "forward"]
        yield from ((self.backward, i) for i in late if i not in self.forward.written)
        yield from ((self.backward, i) for i in here if ops[i].phase == "backward")

    def _op(self, op: int, members: list[int], reads: tuple[int, ...]) -> Op:
        root, ops = self.captured.graph.ops[op], self.captured.graph.ops
        same = [ops[i] for i in members if ops[i].phase == root.phase]
        return Op(
            name=root.name,
            # Dropout's mask is a comparison: cheap, but for what is drawn within the same kernel.
            target=next((o.target for o in [root, *reversed(same)] if not is_cheap(o)), root.target),
            inputs=self._values(reads),
            outputs=self._values(root.outputs),
            phase=root.phase,
            pin=next((o.pin for o in same if o.pin), None),
            needed=next((o.needed for o in same if o.needed), None),
            module=root.module,
        )

    def _values(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(self._value, values))

    def _value(self, value: int) -> int:
        if value not in self.index:
            self.index[value] = len(self.values)
            known = self.captured.graph.values[value]
            self.values.append(Value(known.name, self._storage(known.storage)))
        return self.index[value]

    def _storage(self, storage: int) -> int:
        if storage not in self.storages:
            self.storages[storage] = len(self.storage_bytes)
            self.storage_bytes.append(self.captured.graph.storage_bytes[storage])
        return self.storages[storage]
