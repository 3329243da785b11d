"""A plan for a chain of segments, by dynamic programming: recomputation nested as deep as the budget asks.

That of rotor (Beaumont et al. 2019), after Revolve (Griewank, Walther 2000), with several choices of what a
segment keeps, and with what backward itself needs at each stage. With i <= j, and m bytes for all but what
enters segment i, what it costs to go back from segment j to i, when it is at the input of i:

    C(i, j, m) = the least of
        keep       run i, keep some of its blocks and what leaves it, go back from j to i+1, then over i
        checkpoint run i to k-1, keep what enters k alone, go back from j to k, then from k-1 to i anew

Bytes are counted in units, rounded up; the plan that comes out is measured exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rematc.problem import Problem
from rematc.solve.choices import Choice, choices_of
from rematc.solve.decode import missing
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.merge import Merged
from rematc.solve.segments import Chain, chain_of

LEVELS = 320  # of bytes that are told apart
TRIES = 6


@dataclass(frozen=True, slots=True)
class Decision:
    """From stage ``at`` (-1: forward) to its end, a segment keeps as ``choice`` says, or what enters it."""

    segment: int
    choice: Choice | None
    at: int


class ChainPlans:
    """The table of C for budgets up to ``budget_bytes``, and plans read off it."""

    def __init__(self, problem: Problem, merged: Merged, chain: Chain) -> None:
        assert problem.budget_bytes is not None
        self.problem, self.merged, self.chain = problem, merged, chain
        self.choices = choices_of(merged, chain)
        core, n = chain.core, len(chain.segments)
        self.first = [s.stages[0] if s.stages else s.stages.start for s in chain.segments]
        base = [core.stages[min(t, len(core.stages) - 1)].before_bytes for t in self.first]
        kept = [chain.always_bytes[min(t, len(core.stages) - 1)] for t in self.first]
        self.base = [b + k for b, k in zip(base, kept, strict=True)]
        self.low = min(self.base)
        self.unit = max(1, -(-(problem.budget_bytes - self.low) // (LEVELS - 1)))
        size = core.block_bytes
        self.enters = [0 if s.enters is None else self._units(size[s.enters]) for s in chain.segments]
        self.table = np.full((n, n, LEVELS), np.inf)
        self.shifted = np.full((n, n, LEVELS), np.inf)  # C(k, j, m - what enters k)
        self.run_ns = np.array([c[-1].make_ns for c in self.choices], dtype=float)  # nothing is kept
        self.run_bytes = [c[-1].make_bytes for c in self.choices]
        for length in range(n):
            for i in range(n - length):
                self._fill(i, i + length)

    def written(self, budget_bytes: int) -> Written | None:
        """A plan within ``budget_bytes``, or None."""
        asked = budget_bytes
        for _ in range(TRIES):
            level = (asked - self.low) // self.unit
            if level < 0 or not math.isfinite(self.table[0, -1, min(level, LEVELS - 1)]):
                return None
            found = expand(self.problem, self.merged, self._draft(min(level, LEVELS - 1)))
            if found.plan.peak_bytes <= budget_bytes:
                return found
            asked -= max(self.unit, found.plan.peak_bytes - budget_bytes)
        return None

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
        if i == j:
            cost = self._single(i).min(axis=0)
        else:
            cost = np.minimum(self._keep(i, j).min(axis=0), self._checkpoint(i, j).min(axis=0))
        self.table[i, j] = cost
        shift = min(self.enters[i], LEVELS)
        self.shifted[i, j, shift:] = cost[: LEVELS - shift]

    def _single(self, i: int) -> np.ndarray:
        """Cost by choice and level of going back over segment i alone, from what enters it."""
        rows = np.full((len(self.choices[i]), LEVELS), np.inf)
        for row, c in zip(rows, self.choices[i], strict=True):
            row[self._level(max(c.peak_bytes, self.base[i] + c.make_bytes)) :] = c.make_ns + c.again_ns
        return rows

    def _keep(self, i: int, j: int) -> np.ndarray:
        """Cost by choice and level of keeping that of segment i."""
        rows = np.full((len(self.choices[i]), LEVELS), np.inf)
        for row, c in zip(rows, self.choices[i], strict=True):
            shift = self._units(c.kept_bytes)
            first = max(shift, self._level(max(c.peak_bytes, self.base[j] + c.make_bytes)))
            if first < LEVELS:
                row[first:] = self.shifted[i + 1, j, first - shift : LEVELS - shift] + (
                    c.make_ns + c.again_ns
                )
        return rows

    def _checkpoint(self, i: int, j: int) -> np.ndarray:
        """Cost by k - i - 1 and level of keeping only what enters k."""
        ks = np.arange(i + 1, j + 1)
        rows = self.shifted[ks, j] + self.table[i, ks - 1] + np.cumsum(self.run_ns[i:j])[:, None]
        need = np.maximum.accumulate([self._level(self.base[j] + b) for b in self.run_bytes[i:j]])
        rows[np.arange(LEVELS)[None, :] < need[:, None]] = np.inf
        return rows

    def _draft(self, level: int) -> Draft:
        core = self.chain.core
        decisions = list(self._decisions(level))
        there: list[set[int]] = [set() for _ in core.stages]
        made: list[set[int]] = [set() for _ in core.stages]
        for d in decisions:
            if d.at >= 0:
                made[d.at].update(self._kept(d))
            for t in range(d.at + 1, self._end(d.segment) + 1):
                there[t].update(self._kept(d))
        runs: list[tuple[int, ...]] = [()] * len(core.stages)
        for d in decisions:
            if d.choice:
                for t, units in zip(self.chain.segments[d.segment].stages, d.choice.runs, strict=True):
                    first = missing(core, sorted(made[t]), core.held | self.chain.always | there[t])
                    runs[t] = (*first, *(u for u in units if u not in first))
        saved = {b for d in decisions if d.at < 0 for b in self._kept(d)} | self.chain.always
        return Draft(frozenset(saved) - core.held, tuple(runs))

    def _decisions(self, level: int) -> Iterator[Decision]:
        """Those that cost least at ``level``."""
        stack = [(0, len(self.chain.segments) - 1, level, -1)]
        while stack:
            i, j, m, at = stack.pop()
            if i == j:
                yield Decision(i, self.choices[i][int(self._single(i)[:, m].argmin())], at)
                continue
            keep, checkpoint = self._keep(i, j)[:, m], self._checkpoint(i, j)[:, m]
            if keep.min() <= checkpoint.min():
                choice = self.choices[i][int(keep.argmin())]
                yield Decision(i, choice, at)
                k, left = i + 1, m - self._units(choice.kept_bytes)
            else:
                k, left = i + 1 + int(checkpoint.argmin()), m
                stack.append((i, k - 1, m, self.first[k - 1]))
            yield Decision(k, None, at)
            stack.append((k, j, left - self.enters[k], at))

    def _kept(self, decision: Decision) -> frozenset[int]:
        """The blocks that ``decision`` keeps."""
        if decision.choice:
            return decision.choice.kept
        enters = self.chain.segments[decision.segment].enters
        return frozenset() if enters is None else frozenset((enters,))

    def _end(self, i: int) -> int:
        """The last stage of segment ``i``."""
        stages = self.chain.segments[i].stages
        return stages[-1] if stages else stages.start - 1


def chain_plans(problem: Problem, merged: Merged) -> ChainPlans | None:
    """Plans for the merged core as a chain; None if it isn't one."""
    chain = chain_of(merged.core)
    return None if chain is None else ChainPlans(problem, merged, chain)
