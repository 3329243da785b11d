"""A plan without a MILP for any graph: run op after op, and evict what costs least when room is short.

What is read and was evicted is made again, with all that is missing on the way to it. Dynamic tensor
rematerialization (Kirisame et al. 2021) does so while a model runs; here what is read when is known
beforehand, so that a block which is read soon stays (Belady 1966).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable

from rematc.problem import Problem
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core

MOST_RUNS = 60  # of units, for each there is: who needs more makes hardly any headway
DEEPEST = 150  # units made again for one another
RUN_S, LOOK_S = 2e-5, 5e-7  # of work, for a unit made again, and one looked at for what that costs
TRIES = 3

Score = Callable[[int, int, int], float]  # from what a block costs, its bytes, stages to its next use

SCORES: tuple[Score, ...] = (
    lambda cost, size, wait: cost / (size * wait),
    lambda cost, size, wait: 1 / wait,
    lambda cost, size, wait: cost / size,
)


def evict(problem: Problem, merged: Merged, deadline: Deadline) -> Written | None:
    """The cheapest plan within the budget that one of `SCORES` leads to, or None.

    Of what a forward pass makes, that is saved which backward reads before it is evicted.

    >>> from rematc.exchange import from_networkx
    >>> import networkx
    >>> from rematc.solve.merge import unmerged
    >>> from rematc.solve.reduce import reduce
    >>> dag = networkx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    >>> for node, size in zip("abcd", (10, 10, 10, 1)):
    ...     dag.add_node(node, bytes=size, runtime_ns=7)
    >>> problem = from_networkx(dag).with_budget(25)
    >>> written = evict(problem, unmerged(reduce(problem)), Deadline.after(1.0))
    >>> written.plan.backward, written.plan.cost_ns
    ((0, 1, 2, 0, 3), 7)
    """
    assert problem.budget_bytes is not None
    core, found = merged.core, list[Written]()
    for score in SCORES:
        limit = problem.budget_bytes
        for _ in range(TRIES):
            draft = _Memory(core, limit, score, deadline).draft()
            if draft is None:
                break
            written = expand(problem, merged, draft)
            if written.plan.peak_bytes <= problem.budget_bytes:
                found.append(written)
                break
            limit -= written.plan.peak_bytes - problem.budget_bytes  # parts of units take more than their sum
    return min(found, key=lambda w: w.plan.cost_ns, default=None)


class _FullError(Exception):
    """There is no room, whatever is evicted."""


class _Memory:
    """The blocks that are there, at stage ``t``; those that ops wait for are locked."""

    def __init__(self, core: Core, limit: int, score: Score, deadline: Deadline) -> None:
        self.core, self.limit, self.score, self.deadline = core, limit, score, deadline
        self.uses: list[list[int]] = [[] for _ in core.block_bytes]
        for t, stage in enumerate(core.stages):
            for b in stage.reads:
                self.uses[b].append(t)
        self.there = {b for b, u in enumerate(core.maker) if core.born[u] < 0 and b not in core.held}
        self.saved, self.unread = {*self.there}, {*self.there}
        self.locked: Counter[int] = Counter()
        self.t = self.count = 0
        self.taken = sum(core.block_bytes[b] for b in self.there)
        self.run: list[int] = []

    def draft(self) -> Draft | None:
        """What is saved, and the units that run again in each stage; None where the room does not do."""
        found = []
        try:
            self._room(self.core.stages[0].before_bytes)
            for t, stage in enumerate(self.core.stages):
                self.t, self.run = t, []
                self._lock(stage.reads, stage.before_bytes, 0)
                self._room(stage.op_bytes)
                if stage.unit is not None:
                    self._add(self.core.units[stage.unit].makes)
                self._unlock(stage.reads)
                found.append(tuple(self.run))
        except _FullError:
            return None
        return Draft(frozenset(self.saved - self.unread), tuple(found))

    def _lock(self, blocks: Iterable[int], beside: int, depth: int) -> None:
        """Have ``blocks`` there: those first of which most is missing."""
        wanted = [b for b in blocks if b not in self.core.held]
        present = [b for b in wanted if b in self.there]
        self.unread.difference_update(present)
        self.locked.update(present)
        for b in sorted({*wanted} - {*present}, key=lambda b: -self._cost(b)):
            if b not in self.there:  # unless it came with another
                self._make(self.core.maker[b], beside, depth)
            self.locked[b] += 1

    def _unlock(self, blocks: Iterable[int]) -> None:
        self.locked.subtract(b for b in blocks if b not in self.core.held)

    def _make(self, u: int, beside: int, depth: int) -> None:
        self.count += 1
        spend(RUN_S)
        is_late = self.deadline.left() <= 0
        if is_late or depth > DEEPEST or self.count > MOST_RUNS * len(self.core.units):
            raise _FullError
        unit = self.core.units[u]
        self._lock(unit.reads, beside, depth + 1)
        new = [b for b in unit.makes if b not in self.there]
        self._room(beside + unit.workspace_bytes + sum(self.core.block_bytes[b] for b in new))
        self._add(new)
        self._unlock(unit.reads)
        self.run.append(u)

    def _add(self, blocks: Iterable[int]) -> None:
        new = [b for b in blocks if b not in self.there]
        self.there.update(new)
        self.taken += sum(self.core.block_bytes[b] for b in new)

    def _room(self, needed: int) -> None:
        """Evict until ``needed`` bytes fit beside what is there."""
        if self.taken + needed <= self.limit:
            return
        free = [b for b in self.there if self.locked[b] <= 0 and self.core.block_bytes[b]]
        free = [b for b in free if not self.core.units[self.core.maker[b]].pinned]
        for out in sorted(free, key=lambda b: (self._score(b), b)):
            self.there.discard(out)
            if out in self.unread:
                self.saved.discard(out)
            self.taken -= self.core.block_bytes[out]
            if self.taken + needed <= self.limit:
                return
        raise _FullError

    def _score(self, b: int) -> float:
        uses = self.uses[b]
        at = bisect_right(uses, self.t)
        until = uses[at] if at < len(uses) else len(self.core.stages) ** 2  # none: it may serve others
        return self.score(self._cost(b), self.core.block_bytes[b], until - self.t)

    def _cost(self, b: int) -> int:
        """Time to make b again from what is there."""
        units, maker = self.core.units, self.core.maker
        seen, stack, cost = {maker[b]}, [maker[b]], 0
        while stack:
            unit = units[stack.pop()]
            cost += unit.cost_ns
            for x in unit.reads:
                if x not in self.there and x not in self.core.held and maker[x] not in seen:
                    seen.add(maker[x])
                    stack.append(maker[x])
        spend(LOOK_S * len(seen))
        return cost
