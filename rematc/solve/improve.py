"""Make a plan cheaper, a few units at a time.

Large neighbourhood search (Shaw 1998): the decisions about most units stay as they are, so each MILP is
small and has a solution from the start. Those of one part of the backward pass after the other are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from rematc.problem import Problem
from rematc.solve.deadline import Deadline
from rematc.solve.decode import decode, encode
from rematc.solve.expand import Written, excesses, expand
from rematc.solve.formulate import Formulation
from rematc.solve.paths import add_cuts
from rematc.solve.reduce import Core
from rematc.solve.refine import MANY_AT_ONCE, Refined, build, refine
from rematc.solve.spans import tightest
from rematc.solve.tail import Tail
from rematc.solve.tighten import add_broken

FREE, PARTS = 24, 40  # units that are free at the least: so many, and such a part of all
PAIRS = (0.5, 0.25)  # how far the two parts of a pair are apart, of the backward pass
NEAR = 1.03  # times the bound: a plan so cheap is the only start
TRIES = 8  # for the same units, as long as memory rows turn out to be missing
NODES = 100
PATIENCE = 0.25  # of the time left, for one step: most take next to nothing
MENDING = 0.75  # the same, where a plan is to be mended
LONGER = 2.0  # times as long as a step had that was cut short: worth another try


class Starts(NamedTuple):
    """Plans to start from, a lower bound on all costs that came with them, and which of these is greedy."""

    plans: list[Written]
    bound_ns: int = 0
    greedy: Written | None = None


class Improver:
    """Plans within the budget, and the search for cheaper ones around them.

    Where a search ends depends on where it starts, and the cheapest start is not always the best one: each
    is swept once, and then the one that is cheapest by then goes on alone.
    """

    def __init__(self, problem: Problem, starts: Callable[[], Starts]) -> None:
        self.problem = problem
        self.starts: Callable[[], Starts] | None = starts
        self.searches: list[_Neighbourhood] = []
        self.greedy: Written | None = None  # of the starts
        self.bound_ns = 0  # that came with the starts
        self.tail: Tail | None = None  # told exactly

    def begin(self, known: Written | None = None, bound_ns: int = 0) -> None:
        """Start from the plan that is ``known``, if that is near the bound; if not, find others, once."""
        near = known and _cost(known) <= NEAR * bound_ns
        if not self.searches and not near and self.starts:
            found, self.bound_ns, self.greedy = self.starts()
            self.starts = None
            starts = [*found, known] if known else found
            self.searches = [self._around(plan) for plan in starts]
        elif known:
            self.offer(known)

    def begin_from(self, plan: Written) -> None:
        """Start from ``plan``, there is no other."""
        self.greedy = plan
        self.offer(plan)

    @property
    def best(self) -> Written | None:
        """The cheapest plan so far, if there is one."""
        return min((a.best for a in self.searches), key=_cost, default=None)

    def run(self, goal_ns: float, gap: float, deadline: Deadline, end: Deadline | None = None) -> None:
        """Make ``best`` cheaper until it costs ``goal_ns`` at most, all was free at once, or ``deadline``.

        It may be called again, until ``end``: a step may take a part of the time until then.
        """
        while len(self.searches) > 1 and deadline.left() > 0:
            if min(_cost(a.best) for a in self.searches) <= goal_ns:
                return
            first = next(a for a in self.searches if not a.is_swept)
            first.run(goal_ns, gap, deadline, end or deadline, once=True)
            if all(a.is_swept for a in self.searches):
                self.searches = [min(self.searches, key=lambda a: _cost(a.best))]
        if len(self.searches) == 1:
            self.searches[0].run(goal_ns, gap, deadline, end or deadline)

    def offer(self, other: Written) -> None:
        """Go on from ``other`` if it is cheaper."""
        cheapest = min(self.searches, key=lambda a: _cost(a.best), default=None)
        if cheapest is None or _cost(other) < _cost(cheapest.best):
            if cheapest and other.merged is cheapest.merged:
                cheapest.go_on_from(other)
            else:
                self.searches = [self._around(other)]

    def _around(self, plan: Written) -> _Neighbourhood:
        core = plan.merged.core
        tail = self.tail if self.tail and self.tail.core is core else None
        return _Neighbourhood(self.problem, plan, Refined(tightest(core), tail=tail))


class _Neighbourhood:
    """One plan, ``best``, and the search around it; ``is_swept`` once that was everywhere."""

    def __init__(self, problem: Problem, start: Written, refined: Refined) -> None:
        self.problem, self.merged, self.best = problem, start.merged, start
        self.counted = start.merged.counted()
        self.refined = refined
        self.near = _Near(self.merged.core)
        self.is_swept = self.is_through = False
        self.hasty_s = math.inf  # the least that a step had which was cut short
        self.parts = self._parts()
        self.f: Formulation | None = None

    def run(self, goal_ns: float, gap: float, deadline: Deadline, end: Deadline, once: bool = False) -> None:
        """Go on until ``deadline``, or all was free at once; if ``once``, until it is swept.

        Where that was over, but some steps were cut short and now would have far longer: all over again.
        """
        if self.is_through and PATIENCE * end.left() >= LONGER * self.hasty_s:
            self._begin_anew()
        while _cost(self.best) > goal_ns and deadline.left() > 0:
            if (once and self.is_swept) or (free := next(self.parts, None)) is None:
                self.is_through = not once
                break
            for _ in range(TRIES):
                if not self._step(free, gap, PATIENCE * end.left()) or deadline.left() <= 0:
                    break

    def go_on_from(self, better: Written) -> None:
        """``better`` is the best plan from now on; all over again if that was over."""
        self.best = better
        if self.is_through:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.parts, self.is_through, self.hasty_s = self._parts(), False, math.inf

    def _parts(self) -> Iterator[frozenset[int]]:
        """The units to free, few of them at first, then twice as many, until it is all of them.

        Then all over again, if that helped.
        """
        before = math.inf
        while _cost(self.best) < before:
            before = _cost(self.best)
            for n in _sizes(len(self.near.read)):
                *parts, last = dict.fromkeys(self.near.sweep(n))  # where few are left, all are the same
                yield from parts
                self.is_swept = True
                yield last

    def _step(self, free: frozenset[int], gap: float, time_limit_s: float) -> bool:
        """Decide about ``free`` units anew; True if memory rows were missing, and now are there."""
        found = self._decided(free, gap, time_limit_s)
        if found is None:
            return False
        if _fits(self.problem, found):
            self.best = min(self.best, found, key=_cost)
            return False
        return self._refined(found)

    def mended(self, gap: float, deadline: Deadline, sizes: int | None) -> Written | None:
        """A plan that fits, for one that does not: what is near where that breaks the budget decided anew."""
        over = {t or 0 for _, t, _ in excesses(self.problem, self.best)}  # forward ends where stage 0 begins
        for n in islice(_sizes(len(self.near.read)), sizes):
            free = self.near.units(over, n)
            for _ in range(TRIES):
                if deadline.left() <= 0:
                    return None
                found = self._decided(free, gap, MENDING * deadline.left())
                if found is None:
                    break
                if _fits(self.problem, found):
                    return found
                if not self._refined(found):
                    return None
        return None

    def _decided(self, free: frozenset[int], gap: float, time_limit_s: float) -> Written | None:
        """``best`` with ``free`` units decided anew, as far as the memory rows that are there say."""
        f, cuts = self.f, self.refined.cuts
        if f is None:
            f = self.f = build(self.problem, self.counted, self.refined)
            add_cuts(f, cuts)
        said = encode(f, self.best.draft)
        fixed = {x: v for x, (u, v) in said.items() if u is not None and u not in free}
        hint = {x: v for x, (_, v) in said.items() if x not in fixed}
        end = Deadline.after(time_limit_s)
        add_broken(f, cuts, end, fixed)
        result = f.model.solve(gap=gap, time_limit_s=end.left(), node_limit=NODES, fixed=fixed, hint=hint)
        if not result.finished:
            self.hasty_s = min(self.hasty_s, time_limit_s)
        return None if result.values is None else expand(self.problem, self.merged, decode(f, result.values))

    def _refined(self, found: Written) -> bool:
        """The memory rows that ``found`` breaks are added; False if they were there."""
        self.f = None
        return refine(self.problem, self.merged, self.refined, found, at_once=MANY_AT_ONCE, strict=True)


def mended(
    problem: Problem,
    written: Written,
    refined: Refined,
    gap: float,
    deadline: Deadline,
    sizes: int | None = None,
) -> Written | None:
    """A plan that fits, like ``written``, which does not; None if none is found near it.

    How many units are decided anew is doubled until there is one, but only so many ``sizes`` are tried.
    """
    assert problem.budget_bytes is not None
    return _Neighbourhood(problem, written, refined.within(problem.budget_bytes)).mended(gap, deadline, sizes)


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


def _sizes(every: int) -> Iterator[int]:
    """How many units of ``every`` to free at once: `FREE` or a part of all, and twice that, up to all."""
    n = max(FREE, every // PARTS)
    yield n
    while n <= every:
        n *= 2
        yield n


def _fits(problem: Problem, written: Written) -> bool:
    assert problem.budget_bytes is not None
    return written.plan.peak_bytes <= problem.budget_bytes


def _cost(written: Written) -> int:
    return written.plan.cost_ns
