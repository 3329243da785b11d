"""A plan for a chain of segments, by dynamic programming: recomputation nested as deep as the budget asks.

That of rotor (Beaumont et al. 2019), after Revolve (Griewank, Walther 2000), with several choices of what a
segment keeps, and with what backward itself needs at each stage. With i <= j, and m bytes for all but what
enters segment i, what it costs to go back from segment j to i, when it is at the input of i:

    C(i, j, m) = the least of
        keep       run i, keep some of its blocks and what leaves it, go back from j to i+1, then over i
        checkpoint run i to k-1, keep what enters k alone, go back from j to k, then from k-1 to i anew

C(i, n, m) is the same for the first pass, from the last of n segments: what forward runs anyway is free.
In place of segment i alone, some of those that follow it can be taken with it as one, as a window.

Bytes are counted in units, rounded up; the plan that comes out is measured exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rematc.problem import Problem
from rematc.solve.choices import Choice, Window, windows_of
from rematc.solve.clock import spend
from rematc.solve.cutting import chains_of
from rematc.solve.decode import missing
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.merge import Merged
from rematc.solve.segments import Chain, Segment

LEVELS, FINEST = 320, 4000  # of bytes that are told apart: so many for `MOST` segments, more for fewer
ENTRIES = 2_000_000  # of the table, where that is more than `LEVELS`
COARSE = 3  # times a common block's size: a unit for which there are more levels instead
ROOM = 1.2  # budgets: what is counted in units, and by parts, can be more than a plan needs
SEGMENT_S, ENTRY_S = 0.015, 1.5e-9  # of work, for each segment, and each look at an entry
TRIES = 6


@dataclass(frozen=True, slots=True)
class Decision:
    """From stage ``at`` (-1: forward) to its end, a segment keeps as ``choice`` says, or what enters it."""

    segment: Segment
    choice: Choice | None
    at: int


class ChainPlans:
    """The table of C for budgets up to ``budget_bytes``, and plans read off it."""

    def __init__(self, problem: Problem, merged: Merged, chain: Chain) -> None:
        assert problem.budget_bytes is not None
        self.problem, self.merged, self.chain = problem, merged, chain
        self.budget_bytes = problem.budget_bytes
        self.windows = windows_of(merged, chain)
        core, self.n = chain.core, len(chain.segments)
        self.first = [s.stages[0] if s.stages else s.stages.start for s in chain.segments]
        before = [core.stages[min(t, len(core.stages) - 1)].before_bytes for t in self.first]
        kept = [chain.always_bytes[min(t, len(core.stages) - 1)] for t in self.first]
        base = [b + k for b, k in zip(before, kept, strict=True)]
        self.base = [*base, base[-1]]
        self.low = min(self.base)
        entering = [sum(core.block_bytes[b] for b in s.enters) for s in chain.segments]
        most = max(0, round(ROOM * (problem.budget_bytes - self.low)))
        self.unit = _unit(most, entering)
        self.levels = most // self.unit + 2
        self.enters = list(map(self._units, entering))
        self.level, self.nothing = np.arange(self.levels), np.zeros(self.levels, dtype=np.float32)
        self.table = np.full((self.n, self.n + 1, self.levels), np.inf, dtype=np.float32)
        self.shifted = self.table.copy()  # C(k, j, m - what enters k)
        plain = [of_segment[0].choices[-1] for of_segment in self.windows]  # nothing is kept
        self.run_ns = np.array([c.make_ns for c in plain], dtype=np.float32)
        self.first_ns = np.array([c.first_ns for c in plain], dtype=np.float32)
        self.run_bytes = [c.make_bytes for c in plain]
        for j in range(self.n + 1):
            for i in reversed(range(self._last(j) + 1)):
                self._fill(i, j)
        spend(SEGMENT_S * self.n + ENTRY_S * self.n * self.table.size)

    def written(self, budget_bytes: int) -> Written | None:
        """The cheapest plan within ``budget_bytes`` that some level says, or None; found by bisection."""
        best, low, high = None, -1, self.levels
        level = min((budget_bytes - self.low) // self.unit, self.levels - 1)
        for n in range(TRIES):
            if level <= low:
                break
            found = self._at(level)
            if found is None or found.plan.peak_bytes <= budget_bytes:
                fitting = [w for w in (best, found) if w]
                best, low = min(fitting, key=lambda w: w.plan.cost_ns, default=None), level
            else:
                high = level
            level = (low + high) // 2
            if n == 0 and high < self.levels and found:  # by as much less as it was too much, then by halves
                level = max(low + 1, high - self._units(found.plan.peak_bytes - budget_bytes))
        return best

    def _at(self, level: int) -> Written | None:
        """The plan that costs least at ``level``, measured; None if nothing fits there."""
        if level < 0 or not math.isfinite(self.table[0, -1, level]):
            return None
        return expand(self.problem, self.merged, self._draft(level))

    def lowest(self) -> Written | None:
        """Of the plans that need least by the table, the one that does."""
        (fit,) = np.nonzero(np.isfinite(self.table[0, -1]))
        drafts = [self._draft(int(level)) for level in fit[:TRIES]]
        found = [expand(self.problem, self.merged, draft) for draft in drafts]
        return min(found, key=lambda written: written.plan.peak_bytes, default=None)

    def _units(self, size: int) -> int:
        return -(-size // self.unit)

    def _level(self, size: int) -> int:
        """The least level at which ``size`` bytes fit."""
        return max(0, -(-(size - self.low) // self.unit))

    def _fill(self, i: int, j: int) -> None:
        cost = self.table[i, j]
        for window in self._inside(i, j):
            for _, first, row in self._keep(i, j, window):
                np.minimum(cost[first:], row, out=cost[first:])
        if i < self._last(j):
            np.minimum(cost, self._checkpoint(i, j).min(axis=0), out=cost)
        shift = min(self.enters[i], self.levels)
        self.shifted[i, j, shift:] = cost[: self.levels - shift]

    def _last(self, j: int) -> int:
        """The segment from which column ``j`` goes back."""
        return min(j, self.n - 1)

    def _inside(self, i: int, j: int) -> list[Window]:
        """The windows that begin with segment i and end by the last one."""
        return [window for window in self.windows[i] if i + window.length <= self._last(j) + 1]

    def _keep(self, i: int, j: int, window: Window) -> Iterator[tuple[Choice, int, np.ndarray]]:
        """Choices of ``window``, which begins with segment i: the least level for each, its cost from there.

        Where that is the last one, and not in the first pass, there is nothing to keep anything for.
        """
        after, is_first = i + window.length, j == self.n
        is_last = after > self._last(j)
        for c in window.choices:
            cost, need = c.again_ns + c.make_ns, max(c.peak_bytes, self.base[j] + c.make_bytes)
            if is_first:
                cost = c.again_ns + c.first_ns
            elif is_last:
                if c.kept:
                    continue
                cost, need = c.again_ns, c.peak_bytes
            shift = 0 if is_last else self._units(c.kept_bytes)
            first = max(shift, self._level(need))
            if first < self.levels:
                later = self.nothing if is_last else self.shifted[after, j]
                yield c, first, later[first - shift : self.levels - shift] + np.float32(cost)

    def _checkpoint(self, i: int, j: int) -> np.ndarray:
        """Cost by k - i - 1 and level of keeping only what enters k."""
        last, run_ns = self._last(j), self.run_ns if j < self.n else self.first_ns
        rows = self.shifted[i + 1 : last + 1, j] + self.table[i, i:last]
        rows += np.cumsum(run_ns[i:last])[:, None]
        need = np.maximum.accumulate([self._level(self.base[j] + b) for b in self.run_bytes[i:last]])
        rows[self.level < need[:, None]] = np.inf
        return rows

    def _draft(self, level: int) -> Draft:
        core = self.chain.core
        decisions = list(self._decisions(level))
        made: list[set[int]] = [set() for _ in core.stages]
        for d in decisions:
            if d.at >= 0:
                made[d.at].update(self._kept(d))
        there = {
            t: {b for d in decisions if d.at < t < d.segment.end for b in self._kept(d)}
            for t, blocks in enumerate(made)
            if blocks
        }
        runs: list[tuple[int, ...]] = [()] * len(core.stages)
        for d in decisions:
            if d.choice:
                for t, units in zip(d.segment.stages, d.choice.runs, strict=True):
                    first = missing(
                        core, sorted(made[t]), core.held | self.chain.there(t) | there.get(t, set())
                    )
                    runs[t] = (*first, *(u for u in units if u not in first))
        saved = {b for d in decisions if d.at < 0 for b in self._kept(d)} | self.chain.saved
        return Draft(frozenset(saved) - core.held, tuple(runs))

    def _decisions(self, level: int) -> Iterator[Decision]:
        """Those that cost least at ``level``."""
        segments = self.chain.segments
        stack = [(0, len(segments), level, -1)]
        while stack:
            i, j, m, at = stack.pop()
            best = self._kept_best(i, j, m)
            checkpoint = self._checkpoint(i, j)[:, m] if i < self._last(j) else np.full(1, np.inf)
            if best and best[0] <= checkpoint.min():
                _, window, choice = best
                yield Decision(window.segment, choice, at)
                k, left = i + window.length, m - self._units(choice.kept_bytes)
            else:
                k, left = i + 1 + int(checkpoint.argmin()), m
                stack.append((i, k - 1, m, self.first[k - 1]))
            if k <= self._last(j):
                yield Decision(segments[k], None, at)
                stack.append((k, j, left - self.enters[k], at))

    def _kept_best(self, i: int, j: int, level: int) -> tuple[float, Window, Choice] | None:
        """The window that begins with segment i and its choice for which it costs least, after that cost."""
        found = (
            (float(row[level - first]), window, choice)
            for window in self._inside(i, j)
            for choice, first, row in self._keep(i, j, window)
            if first <= level
        )
        return min(found, key=lambda each: each[0], default=None)

    def _kept(self, decision: Decision) -> frozenset[int]:
        """The blocks that ``decision`` keeps."""
        return decision.choice.kept if decision.choice else decision.segment.enters


def _unit(most: int, entering: list[int]) -> int:
    """A unit of up to ``most`` bytes in which what enters a segment is a whole number, if that can be."""
    levels = min(FINEST, max(LEVELS, ENTRIES // len(entering) ** 2))
    least, common = max(1, -(-most // levels)), sorted(entering)[len(entering) // 2]
    if common >= least:
        return -(-common // (common // least))
    return common if common * COARSE >= least else least


def plans_of_chains(problem: Problem, merged: Merged) -> list[ChainPlans]:
    """Plans for the merged core as a chain, in each way that it is one; the last has the lowest peak.

    Those that need more than the budget are left out: to look at them takes time, and hardly ever finds any.
    """
    budget = problem.budget_bytes
    assert budget is not None
    chains = (chain for chain in chains_of(merged.core, budget) if chain.lowest_bytes <= budget)
    return [ChainPlans(problem, merged, chain) for chain in chains]


def cheapest(plans: Iterable[ChainPlans]) -> Written | None:
    """Of the plans within the budget, in whichever way it is a chain."""
    found = (each.written(each.budget_bytes) for each in plans)
    return min(filter(None, found), key=lambda written: written.plan.cost_ns, default=None)


def chained(problem: Problem, merged: Merged) -> Written | None:
    """The cheapest plan within the budget that there is for the merged core as a chain."""
    return cheapest(plans_of_chains(problem, merged))
