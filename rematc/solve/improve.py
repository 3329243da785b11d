"""Make a plan cheaper, a few units at a time.

Large neighbourhood search (Shaw 1998): the decisions about most units stay as they are, so each MILP is
small and has a solution from the start. Those of one part of the backward pass after the other are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode, encode
from rematc.solve.expand import Written, expand
from rematc.solve.formulate import Formulation
from rematc.solve.reduce import Core
from rematc.solve.refine import Refined, build, refine
from rematc.solve.spans import tightest

FREE, PARTS = 24, 40  # units that are free at the least: so many, and such a part of all
PAIRS = (0.5, 0.25)  # how far the two parts of a pair are apart, of the backward pass
NEAR = 1.1  # times the bound
TRIES = 8  # for the same units, as long as memory rows turn out to be missing
NODES = 100
PATIENCE = 0.25  # of the time left, for one step: most take next to nothing


class Starts(NamedTuple):
    """Plans to start from, and a lower bound on the cost of every plan that came with them."""

    plans: list[Written]
    bound_ns: int = 0


class Improver:
    """Plans within the budget, and the search for cheaper ones around them.

    Where a search ends depends on where it starts, and the cheapest start is not always the best one: each
    is swept once, and then the one that is cheapest by then goes on alone.
    """

    def __init__(self, problem: Problem, starts: Callable[[], Starts]) -> None:
        self.problem = problem
        self.starts: Callable[[], Starts] | None = starts
        self.searches: list[_Neighbourhood] = []
        self.first: Written | None = None
        self.bound_ns = 0  # that came with the starts

    def begin(self, known: Written | None = None, bound_ns: int = 0) -> None:
        """Start from the plan that is ``known``, if that is near the bound; if not, find others, once."""
        near = known and _cost(known) <= NEAR * bound_ns
        if not self.searches and not near and self.starts:
            found, self.bound_ns = self.starts()
            self.starts = None
            self.searches = [_Neighbourhood(self.problem, plan) for plan in found]
            self.first = self.best
        if known:
            self.offer(known)

    def begin_from(self, plan: Written) -> None:
        """Start from ``plan``, there is no other."""
        self.first = plan
        self.offer(plan)

    @property
    def best(self) -> Written | None:
        """The cheapest plan so far, if there is one."""
        return min((a.best for a in self.searches), key=_cost, default=None)

    def run(self, goal_ns: float, gap: float, deadline: Deadline, steps: float = math.inf) -> None:
        """Make ``best`` cheaper until it costs ``goal_ns`` at most, all was free at once, or a limit."""
        while len(self.searches) > 1 and not _at_end(steps, deadline):
            if min(_cost(a.best) for a in self.searches) <= goal_ns:
                return
            first = next(a for a in self.searches if not a.is_swept)
            steps -= first.run(goal_ns, gap, deadline, steps, once=True)
            if all(a.is_swept for a in self.searches):
                self.searches = [min(self.searches, key=lambda a: _cost(a.best))]
        if len(self.searches) == 1:
            self.searches[0].run(goal_ns, gap, deadline, steps)

    def offer(self, other: Written) -> None:
        """Go on from ``other`` if it is cheaper."""
        cheapest = min(self.searches, key=lambda a: _cost(a.best), default=None)
        if cheapest is None or _cost(other) < _cost(cheapest.best):
            if cheapest and other.merged is cheapest.merged:
                cheapest.best = other
            else:
                self.searches = [_Neighbourhood(self.problem, other)]


class _Neighbourhood:
    """One plan, ``best``, and the search around it; ``is_swept`` once that was everywhere."""

    def __init__(self, problem: Problem, start: Written) -> None:
        self.problem, self.merged, self.best = problem, start.merged, start
        self.refined = Refined(tightest(self.merged.core))
        self.near = _Near(self.merged.core)
        self.is_swept = False
        self.parts = self._parts()
        self.f: Formulation | None = None

    def run(self, goal_ns: float, gap: float, deadline: Deadline, steps: float, once: bool = False) -> int:
        """Go on until a limit, or all was free at once; if ``once``, until it is swept: the steps taken."""
        taken = 0
        while _cost(self.best) > goal_ns and not _at_end(steps - taken, deadline):
            if (once and self.is_swept) or (free := next(self.parts, None)) is None:
                break
            for _ in range(TRIES):
                taken += 1
                if not self._step(free, gap, PATIENCE * deadline.left()) or _at_end(steps - taken, deadline):
                    break
        return taken

    def _parts(self) -> Iterator[frozenset[int]]:
        """The units to free, `FREE` of them at first, then twice as many, until it is all of them.

        Then all over again, if that helped.
        """
        every, before = len(self.near.read), math.inf
        while _cost(self.best) < before:
            before, n = _cost(self.best), max(FREE, every // PARTS)
            while n <= 2 * every:
                *parts, last = self.near.sweep(n)
                yield from parts
                self.is_swept = True
                yield last
                n *= 2

    def _step(self, free: frozenset[int], gap: float, time_limit_s: float) -> bool:
        """Decide about ``free`` units anew; True if memory rows were missing, and now are there."""
        assert self.problem.budget_bytes is not None
        f = self.f = self.f or self._formulation()
        said = encode(f, self.best.draft)
        fixed = {x: v for x, (u, v) in said.items() if u not in free}
        hint = {x: v for x, (u, v) in said.items() if u in free}
        result = f.model.solve(gap=gap, time_limit_s=time_limit_s, node_limit=NODES, fixed=fixed, hint=hint)
        if result.values is None:
            return False
        found = expand(self.problem, self.merged, decode(f, result.values))
        if found.plan.peak_bytes <= self.problem.budget_bytes:
            self.best = min(self.best, found, key=_cost)
            return False
        if not refine(self.problem, self.merged, self.refined, found, at_once=16, strict=True):
            return False
        self.f = None
        return True

    def _formulation(self) -> Formulation:
        assert self.problem.budget_bytes is not None
        counted = self.problem.with_budget(self.problem.budget_bytes - self.merged.small_bytes)
        return build(counted, self.merged, self.refined, closures=False)


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

    def sweep(self, n: int) -> Iterator[frozenset[int]]:
        """Parts of the backward pass with n units, from its beginning to its end; then pairs of parts that
        are far from each other, and may pass memory on to each other.
        """
        end = len(self.core.stages)
        places = range(0, end, max(1, end * n // max(1, len(self.read))))
        yield from (self.units((t,), n) for t in places)
        for apart in PAIRS:
            shift = int(len(places) * apart)
            yield from (self.units((t, places[(i + shift) % len(places)]), n) for i, t in enumerate(places))


def _at_end(steps: float, deadline: Deadline) -> bool:
    return steps <= 0 or deadline.left() <= 0


def _cost(written: Written) -> int:
    return written.plan.cost_ns
