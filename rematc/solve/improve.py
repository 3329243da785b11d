"""Make a plan cheaper, a few units at a time.

Large neighbourhood search (Shaw 1998): the decisions about most units stay as they are, so each MILP is
small. Those of one part of the backward pass after the other are free, and where a draft then breaks the
budget, because a memory row was not there yet, those of the units that matter there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rematc.problem import Problem
from rematc.solve.decode import decode
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.formulate import Formulation
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core
from rematc.solve.refine import Refined, build, refine
from rematc.solve.spans import tightest

FREE = 40  # units that are free at the least
MOST_FREE = 4 * FREE  # to mend a draft
SLICE_S = 4.0


class Improver:
    """A plan within the budget, ``best``, and the search for cheaper ones around it."""

    def __init__(self, problem: Problem, merged: Merged, start: Written) -> None:
        self.problem, self.merged = problem, merged
        self.best = self.last = start
        self.refined = Refined(tightest(merged.core))
        self.near = _Near(merged.core)
        self.sweep = self.near.sweep()
        self.n_free = FREE
        self._build()

    def run(self, goal_ns: float, gap: float, deadline: float) -> None:
        """Make ``best`` cheaper until ``deadline``, or it costs ``goal_ns`` at most."""
        while self.best.plan.cost_ns > goal_ns and (left := deadline - time.monotonic()) > 0:
            free = self._free()
            fixed = _fixed(self.f, self.last.draft, free)
            result = self.f.model.solve(gap=gap, time_limit_s=min(left, SLICE_S), fixed=fixed)
            if result.values is None:
                self._retreat()
                continue
            self.last = expand(self.problem, self.merged, decode(self.f, result.values))
            if self._fits() and self.last.plan.cost_ns < self.best.plan.cost_ns:
                self.best = self.last

    def offer(self, other: Written) -> None:
        """Go on from ``other`` if it is cheaper."""
        if other.plan.cost_ns < self.best.plan.cost_ns:
            self.best = self.last = other

    def _fits(self) -> bool:
        assert self.problem.budget_bytes is not None
        return self.last.plan.peak_bytes <= self.problem.budget_bytes

    def _build(self) -> None:
        self.f = build(self.problem, self.merged, self.refined, closures=False)

    def _free(self) -> frozenset[int]:
        """The units to decide about: where the budget is broken, else the next part of the sweep."""
        if self._fits():
            self.n_free = FREE
            return next(self.sweep)
        # One stage after the other: what is fixed must not break a row of its own.
        size = self.refined.size
        worst = refine(self.problem, self.merged, self.refined, self.last, at_once=1, strict=True)
        if self.refined.size != size:
            self._build()
        return self.near.units(worst, self.n_free)

    def _retreat(self) -> None:
        """Nothing found: free more, and when that does not help either, go back to the best plan."""
        self.n_free *= 2
        if self.n_free > MOST_FREE or self._fits():
            self.last = self.best


class _Near:
    """Which units matter most at which stage: those whose blocks are read close to it."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.read: dict[int, list[int]] = {}
        for t, stage in enumerate(core.stages):
            for b in stage.reads:
                self.read.setdefault(core.maker[b], []).append(t)
        for u in reversed(range(len(core.units))):  # those that nobody reads go with who reads theirs
            if u not in self.read:
                readers = {w for b in core.units[u].makes for w in core.readers[b]}
                if at := [t for w in readers for t in self.read.get(w, [])]:
                    self.read[u] = [min(at), max(at)]

    def units(self, stages: Iterable[int], n: int) -> frozenset[int]:
        """The ``n`` units nearest to ``stages``."""
        given = tuple(stages)
        far = {u: min(abs(t - s) for t in at for s in given) for u, at in self.read.items()}
        return frozenset(sorted(far, key=lambda u: (far[u], u))[:n])

    def sweep(self) -> Iterator[frozenset[int]]:
        """Parts of the backward pass, from its beginning to its end, then larger ones."""
        n = FREE
        while True:
            step = max(1, len(self.core.stages) * n // (2 * max(1, len(self.read))))
            for t in range(0, len(self.core.stages), step):
                yield self.units((t,), n)
            n *= 2


def _fixed(f: Formulation, draft: Draft, free: frozenset[int]) -> dict[int, float]:
    """The variables that are not about ``free`` units, at what ``draft`` says."""
    core = f.core
    kept, runs = _kept(f, draft), {(u, f.spans.of(t)) for t, units in enumerate(draft.runs) for u in units}
    found = {x: float((u, k) in runs) for (u, k), x in f.again.items() if u not in free}
    found |= {x: float((b, k) in kept) for (b, k), x in f.kept.items() if core.maker[b] not in free}
    return found


def _kept(f: Formulation, draft: Draft) -> set[tuple[int, int]]:
    """(block, span) where the block is at hand when the span begins, and read before it is made again."""
    core, found = f.core, set()
    wanted: set[int] = set()
    for k in reversed(range(len(f.spans))):
        for t in reversed(f.spans[k]):
            stage = core.stages[t]
            if stage.unit is not None:
                wanted.difference_update(core.units[stage.unit].makes)
            wanted.update(stage.reads)
            for u in reversed(draft.runs[t]):
                wanted.difference_update(core.units[u].makes)
                wanted.update(core.units[u].reads)
        found |= {(b, k) for b in wanted if b not in core.held}
    return found
