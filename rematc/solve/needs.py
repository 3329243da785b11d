"""What an order of the backward ops needs: counted in one pass over it, without a plan."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from rematc.problem import Problem


def needs(problem: Problem, order: tuple[int, ...]) -> tuple[int, int]:
    """The most that is alive in backward or at its end, resident included: all kept, and at the least.

    All kept is what `simulate` counts. At the least is what no plan in this order goes below: backward
    values, results of the forward pass and what can't be made again, and of all else what the op reads.
    """
    tally = _Tally(problem, order)
    extra = [*(problem.costs[i].workspace_bytes for i in order), problem.epilogue_bytes]
    found = []
    for forward in (tally.kept(), tally.read()):
        live = accumulate(map(sum, zip(tally.certain(), forward, strict=True)))
        found.append(problem.resident_bytes + max(map(sum, zip(extra, live, strict=False))))
    return found[0], found[1]


class _Tally:
    """When each storage is alive in the backward pass, as bytes that come and go before each step."""

    def __init__(self, problem: Problem, order: tuple[int, ...]) -> None:
        self.graph, self.order, self.end = problem.graph, order, len(order)
        self.home = [v.storage for v in self.graph.values]
        self.forward = self._of(v for i in self.graph.forward for v in self.graph.ops[i].outputs)
        self.stays = self._of((*self.graph.outputs, *self.graph.gradients, *self.graph.held))
        self.given = self._of((*self.graph.tangents, *self.graph.outputs))
        self.loose = self.forward - self.given - self._made_once()
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for k, i in enumerate(order):
            for v in (*self.graph.ops[i].inputs, *self.graph.ops[i].outputs):
                self.first.setdefault(self.home[v], k)
                self.last[self.home[v]] = k

    def certain(self) -> list[int]:
        """All but the loose storages: those that forward makes and that can be dropped."""
        there = self.given | self.forward
        counted = sorted((self.first.keys() | self.given) - self.loose - self.graph.resident)
        return self._changes((s, 0 if s in there else self.first[s], self._until(s)) for s in counted)

    def kept(self) -> list[int]:
        """The loose storages, each from the start to its last reader."""
        counted = sorted(self.loose & (self.last.keys() | self.stays))
        return self._changes((s, 0, self._until(s)) for s in counted)

    def read(self) -> list[int]:
        """The loose storages, each only where it is read, or where a view that backward took of it lives."""
        taken: dict[int, int] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        reads = [self.graph.ops[i].inputs for i in self.order]
        for k, values in enumerate([*reads, self.graph.gradients]):
            for v in values:
                if self.home[v] in self.loose:
                    spans.setdefault(self.home[v], []).append((taken.get(v, k), k))
            if k < self.end:
                taken.update(dict.fromkeys(self.graph.ops[self.order[k]].outputs, k))
        return self._changes((s, a, b) for s, found in spans.items() for a, b in _union(found))

    def _made_once(self) -> frozenset[int]:
        """What forward ops make that run there, whatever is saved, and can't run again."""
        ops = [self.graph.ops[i] for i in self.graph.forward_steps(())]
        once = [op for op in ops if op.pin or op.needed]
        return frozenset().union(*(self._of(op.outputs) - self._of(op.inputs) for op in once))

    def _until(self, storage: int) -> int:
        return self.end if storage in self.stays else self.last.get(storage, 0)

    def _of(self, values: Iterable[int]) -> frozenset[int]:
        return frozenset(self.home[v] for v in values) - self.graph.resident

    def _changes(self, alive: Iterable[tuple[int, int, int]]) -> list[int]:
        changes = [0] * (self.end + 2)
        for storage, since, until in alive:
            changes[since] += self.graph.storage_bytes[storage]
            changes[until + 1] -= self.graph.storage_bytes[storage]
        return changes


def _union(spans: list[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The same steps as ``spans``, none twice."""
    free = 0
    for a, b in sorted(spans):
        if b >= free:
            yield max(a, free), b
            free = b + 1
