"""List scheduling of the backward ops: of those that are ready, a rule says which runs next.

What may not be swapped is not: what one op reads of another, and `Graph.kept_in_order`. A view costs nothing
and may hold memory, so it is taken right before its first reader.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from rematc.graph import Graph

# The key of an op, from whether it leads to one gradient alone and by how many bytes it makes what is alive
# grow. The lowest is next; on a tie, the first in the graph.
Rule = Callable[[bool, int], int]

RULES: tuple[Rule, ...] = (
    lambda aside, growth: not aside,  # weight gradients at once
    lambda aside, growth: aside and growth > 0,  # weight gradients when that frees memory, or at last
    lambda aside, growth: growth,  # whatever frees most
)


def listed(ties: Ties, rule: Rule) -> tuple[int, ...]:
    """The order that ``rule`` makes."""
    memory = _Memory(ties)
    waits = {i: len(ties.before[i]) for i in ties.ops}

    def entry(i: int) -> tuple[int, int, int]:
        return rule(i in ties.aside, memory.growth[i]), ties.place[i], i

    heap = [entry(i) for i in ties.ops if not waits[i]]
    heapq.heapify(heap)
    ran: dict[int, None] = {}
    while heap:
        key, _, i = heapq.heappop(heap)
        if i in ran or key != entry(i)[0]:
            continue  # it has run, or it stands in the heap once more with what is true now
        ran[i] = None
        for j in ties.after[i]:
            waits[j] -= 1
        ready = [j for j in (*ties.after[i], *memory.run(i)) if not waits[j] and j not in ran]
        for j in ready:
            heapq.heappush(heap, entry(j))
    return ties.with_views(ran)


class _Memory:
    """By how many bytes each op, were it next, makes grow what is alive after it.

    What forward made counts as kept until then: what is recomputed is best read in one place too.
    """

    def __init__(self, ties: Ties) -> None:
        graph = ties.graph
        stays = ties.storages((*graph.outputs, *graph.held)) | graph.resident
        ends = ties.storages(graph.gradients)
        self.bytes = graph.storage_bytes
        self.reads = {i: ties.storages(graph.ops[i].inputs) - stays - ends for i in ties.ops}
        self.readers: dict[int, set[int]] = {}
        for i in ties.ops:
            for s in self.reads[i]:
                self.readers.setdefault(s, set()).add(i)
        self.growth = dict.fromkeys(ties.ops, 0)
        for i in ties.ops:
            made = ties.storages(graph.ops[i].outputs) - ties.storages(graph.ops[i].inputs) - stays
            self.growth[i] += sum(self.bytes[s] for s in made if s in self.readers or s in ends)
        for s in self.readers:
            self._last(s)

    def run(self, i: int) -> list[int]:
        """Op ``i`` runs: the ops that will now be the last to read something."""
        for s in self.reads[i]:
            self.readers[s].discard(i)
        return [j for s in sorted(self.reads[i]) for j in self._last(s)]

    def _last(self, storage: int) -> tuple[int, ...]:
        if len(self.readers[storage]) != 1:
            return ()
        (reader,) = self.readers[storage]
        self.growth[reader] -= self.bytes[storage]
        return (reader,)


class Ties:
    """What holds the backward ops of a graph together: who waits for whom, who reads which memory.

    Views are left out, what they are taken of stands for them.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.place = {i: k for k, i in enumerate(graph.backward_steps)}
        fixed = {i for pair in graph.kept_in_order for i in pair}
        self.views = {i for i in self.place if i not in fixed and i in graph.views}
        self.ops = [i for i in self.place if i not in self.views]
        self.before = self._before()
        self.after: dict[int, list[int]] = {i: [] for i in self.ops}
        for i in self.ops:
            for j in sorted(self.before[i]):
                self.after[j].append(i)
        self.aside = self._aside()

    def storages(self, values: Iterable[int]) -> frozenset[int]:
        """The storages that ``values`` stand in."""
        return frozenset(self.graph.values[v].storage for v in values)

    def _before(self) -> dict[int, set[int]]:
        """The ops that each op waits for."""
        makers: dict[int, frozenset[int]] = {}
        before: dict[int, set[int]] = {}
        for i in self.place:
            op = self.graph.ops[i]
            found = frozenset[int]().union(*(makers.get(v, ()) for v in op.inputs))
            if i not in self.views:
                before[i], found = set(found), frozenset((i,))
            makers.update(dict.fromkeys(op.outputs, found))
        for first, then in self.graph.kept_in_order:
            before[then].add(first)
        return before

    def _aside(self) -> frozenset[int]:
        """Ops that lead to one gradient alone, as those of a weight do."""
        graph, several = self.graph, -1
        leads = {v: v for v in graph.gradients}
        aside = set()
        for i in reversed(self.place):
            to = sorted({leads[v] for v in graph.ops[i].outputs if v in leads})
            end = to[0] if len(to) == 1 else several
            if end != several:
                aside.add(i)
            for v in graph.ops[i].inputs if to else ():
                leads[v] = end if leads.get(v, end) == end else several
        return frozenset(aside)

    def with_views(self, ops: Iterable[int]) -> tuple[int, ...]:
        """``ops`` in their order, the views that each reads right before it."""
        taken: dict[int, None] = {}

        def take(values: Iterable[int]) -> None:
            for v in values:
                i = self.graph.producer.get(v)
                if i in self.views and i not in taken:
                    take(self.graph.ops[i].inputs)
                    taken[i] = None

        for i in ops:
            take(self.graph.ops[i].inputs)
            taken[i] = None
        take(self.graph.gradients)
        return tuple(taken)
