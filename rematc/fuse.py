"""The graph of what is written: values that stay inside one of Inductor's kernels are none of its values.

Inductor decides what to fuse; here its decision for one split of the joint graph is read as a `Capture`. An
op makes one value (or one set of outputs) that is written to memory, with all that is computed on the
way from other written values. So a plan recomputes what a kernel would, and its memory counts what is
really written.

The split that is read has the plan of `rematc.baselines.min_cut`: pointwise ops that backward can
compute within its own kernels, from values that are there, are recomputed in all plans. They cost no
memory and hardly any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx

from rematc.capture import Capture
from rematc.graph import Graph, Op, Phase, Value
from rematc.plan import Plan

Kernels = tuple[tuple[str, ...], ...]
# A value of the joint graph as forward makes it, or as backward does (again, for what it recomputes).
Key = tuple[Phase, int]


def fuse(captured: Capture, plan: Plan, forward: Kernels, backward: Kernels) -> Capture:
    """The graph whose values are those that the two lowered graphs of ``plan`` write.

    ``forward`` and ``backward`` have, for each kernel in order, the names of the FX nodes that it computes.
    A node in several kernels is computed by each. One in no kernel is a view, or something that Inductor
    made into something else, and written for certain.
    """
    saved = frozenset(plan.saved)
    steps = captured.graph.forward_steps(plan.saved)
    sides = (
        _Side(captured, "forward", steps, forward, saved),
        _Side(captured, "backward", plan.backward, backward, saved),
    )
    return _Fused(captured, sides).capture()


@dataclass(frozen=True)
class _Side:
    """One of the two lowered graphs: its steps, and which kernels they are in."""

    captured: Capture
    phase: Phase
    steps: tuple[int, ...]
    kernels: Kernels
    saved: frozenset[int]

    def key(self, value: int) -> Key:
        """The value that a step of this side reads under the name of ``value``."""
        made_here = self.phase == "backward" and value not in self.saved and value in self.producer
        return ("backward" if made_here else "forward", value)

    @cached_property
    def producer(self) -> dict[int, int]:
        """The op by the value that it makes on this side."""
        return {v: i for i in self.steps for v in self.captured.graph.ops[i].outputs}

    @cached_property
    def homes(self) -> dict[int, list[int]]:
        """The kernels that compute each op, in order."""
        of = {node.name: i for i in self.steps for node in self.captured.nodes[i]}
        homes: dict[int, list[int]] = {}
        for k, names in enumerate(self.kernels):
            for i in dict.fromkeys(of[n] for n in names if n in of):
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
        return frozenset(found)

    @property
    def _results(self) -> tuple[int, ...]:
        graph = self.captured.graph
        return (*graph.outputs, *self.saved) if self.phase == "forward" else graph.gradients

    def _read_from_memory(self, reader: int) -> set[int]:
        """The ops whose results a kernel of ``reader`` reads and does not compute itself."""
        read = {self.producer[v] for v in self.captured.graph.ops[reader].inputs if v in self.producer}
        kernels = self.homes.get(reader, (-1,))
        return {i for i in read if any(k not in self.homes.get(i, ()) for k in kernels)}

    def cone(self, op: int) -> tuple[list[int], tuple[int, ...]]:
        """The ops that compute ``op`` from written values, in order of steps, and the values they read."""
        graph, members, reads = self.captured.graph, {op}, dict[int, None]()
        stack = [op]
        while stack:
            for v in graph.ops[stack.pop()].inputs:
                i = self.producer.get(v) if self.key(v)[0] == self.phase else None
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
        """The written ops in the order of the kernels, as far as what they read allows."""
        net = networkx.DiGraph()
        net.add_nodes_from(self.written)
        for i in self.written:
            reads = self.cone(i)[1]
            here = (v for v in reads if self.key(v)[0] == self.phase and v in self.producer)
            net.add_edges_from((self.producer[v], i) for v in here)
        last = -1
        rank: dict[int, tuple[int, int]] = {}
        for i in sorted(self.written, key=self.position.__getitem__):
            last = self.homes[i][0] if i in self.homes else last
            rank[i] = (last, self.position[i])
        return list(networkx.lexicographical_topological_sort(net, rank.__getitem__))


class _Fused:
    """Both sides as one graph."""

    def __init__(self, captured: Capture, sides: tuple[_Side, _Side]) -> None:
        self.captured, self.sides = captured, sides
        self.index: dict[Key, int] = {}
        self.storages: dict[Key, int] = {}
        self.storage_bytes: list[int] = []
        self.values: list[Value] = []

    def capture(self) -> Capture:
        graph = self.captured.graph
        inputs = self._forward(graph.inputs)
        tangents = self._forward(graph.tangents)
        ops, nodes, kernels = [], [], []
        for side in self.sides:
            for i in side.order:
                members, reads = side.cone(i)
                ops.append(self._op(side, i, members, reads))
                nodes.append(tuple(n for m in members for n in self.captured.nodes[m]))
                kernels.append((side.phase, min(side.homes.get(i, ()), default=None)))
        fused = Graph(
            storage_bytes=tuple(self.storage_bytes),
            values=tuple(self.values),
            ops=tuple(ops),
            inputs=inputs,
            tangents=tangents,
            outputs=self._forward(graph.outputs),
            gradients=tuple(self._value(self.sides[1].key(v)) for v in graph.gradients),
            held=self._forward(graph.held),
        )
        of = list(self.index)
        value_nodes = tuple(self.captured.value_nodes[value] for _, value in of)
        return Capture(fused, tuple(nodes), value_nodes, self.captured.gradient_nodes, tuple(kernels))

    def _op(self, side: _Side, op: int, members: list[int], reads: tuple[int, ...]) -> Op:
        root, ops = self.captured.graph.ops[op], self.captured.graph.ops
        again = side.phase == "backward"
        pins = (p for i in members if (p := ops[i].pin) and not (again and ops[i].phase == "forward"))
        return Op(
            name=root.name,
            target=root.target,
            inputs=tuple(self._value(side.key(v)) for v in reads),
            outputs=tuple(self._value((side.phase, v)) for v in root.outputs),
            phase=side.phase,
            pin=next(pins, None),
            needed=next((p for i in members if (p := ops[i].needed)), None),
            module=root.module,
        )

    def _forward(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._value(("forward", v)) for v in values)

    def _value(self, key: Key) -> int:
        if key not in self.index:
            self.index[key] = len(self.values)
            value = self.captured.graph.values[key[1]]
            self.values.append(Value(value.name, self._storage(key[0], value.storage)))
        return self.index[key]

    def _storage(self, phase: Phase, storage: int) -> int:
        again = phase == "backward" and storage in self._made_again
        key: Key = ("backward" if again else "forward", storage)
        if key not in self.storages:
            self.storages[key] = len(self.storage_bytes)
            self.storage_bytes.append(self.captured.graph.storage_bytes[storage])
        return self.storages[key]

    @cached_property
    def _made_again(self) -> frozenset[int]:
        """Storages that forward makes and backward, recomputing, makes a second time."""
        graph = self.captured.graph
        found: set[int] = set()
        for i in self.sides[1].steps:
            if graph.ops[i].phase == "forward":
                read = {graph.values[v].storage for v in graph.ops[i].inputs}
                found |= {graph.values[v].storage for v in graph.ops[i].outputs} - read
        return frozenset(found)
