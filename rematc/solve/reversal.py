"""A plain chain of blocks, gone back over: the cheapest plan, and a proof that no other is cheaper.

Blocks 1 to n are made one after the other, each of the one before, and read in the backward pass from the
last to the first. With u units of memory taken by those that are kept up to block i, what it costs to go back
over blocks i+1 to j:

    F(i, j, u) = the least of
        run i+1 to k, keep k, go back from j to k, then from k-1 to i:   over k in (i, j]
            run(i, k) + F(k, j, u + size[k]) + F(i, k-1, u)     where u + size[k] <= room[k], if k is read
        leave j alone:    F(i, j-1, u)                          if j is not read

In the forward pass to run costs nothing. This is Revolve's recursion (Griewank, Walther 2000), for steps of
different costs (Grimm, Pottier, Rostaing-Schmidt 1996) and with room that changes while gradients pile up.

It is a lower bound for every graph that has such a chain in it. All else is taken to be at hand and to take
nothing, and so is what recomputation itself needs. A plan that gives block p up before it is read can keep,
in its place and for as long, one that comes later and is kept until it is read: that takes no more memory
if sizes do not grow along the chain, so each counts as the least up to it, in units rounded down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rematc.problem import Problem
from rematc.solve.along import along
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Written, expand
from rematc.solve.merge import Merged
from rematc.solve.plain import PlainChain, plain_chain
from rematc.solve.reach import Stop
from rematc.solve.reduce import Core
from rematc.solve.spare import spared

ENTRY_S = 2e-9  # of work, for each look at an entry of the table
LEVELS = 96  # units of memory: with more it takes long
TRIES = 3


@dataclass(frozen=True, slots=True)
class Advance:
    """In stage ``stage`` (-1: forward) blocks ``first`` to ``last`` are made, and the last is kept."""

    first: int
    last: int
    stage: int
    until: int


class Reversal:
    """The table of F for a path within ``limit_bytes``: for a bound, or for a plan.

    For a plan recomputation has to fit too, and sizes are rounded to the nearest unit, not down.
    """

    def __init__(self, path: PlainChain, limit_bytes: int, *, for_plan: bool) -> None:
        self.path = path if for_plan else path.never_growing()
        self.limit_bytes, self.for_plan, n = limit_bytes, for_plan, len(path.blocks)
        read = [k for k in range(1, n + 1) if path.read_in[k] >= 0]
        most = max(limit_bytes - self.path.beside_bytes[k] for k in read)
        common = sorted(path.size[1:])[n // 2]
        parts = max(1, LEVELS * common // max(1, most))
        self.unit = max(1, -(-common // parts) if for_plan else common // parts)
        self.size = [round(s / self.unit) if for_plan else s // self.unit for s in self.path.size]
        self.levels = max(0, min(most // self.unit, sum(self.size))) + 1
        ran = np.cumsum(path.cost_ns, dtype=float)
        self.run = ran[None, :] - ran[:, None]
        level = np.arange(self.levels)
        self.fits = np.zeros((n + 1, self.levels))
        for k in read:
            room = (limit_bytes - self.path.beside_bytes[k]) // self.unit
            self.fits[k, level + self.size[k] > room] = np.inf
        self.table = np.full((n + 1, n + 1, self.levels), np.inf)
        self.kept = np.full((n + 1, n + 1, self.levels), np.inf)  # F(k, j, u + size[k])
        for length in range(n + 1):
            for i in range(n + 1 - length):
                self._fill(i, i + length)
        self.forward = np.full((n + 1, self.levels), np.inf)  # F(i, n, u), from the forward pass on
        for i in reversed(range(n + 1)):
            self.forward[i] = self._in_forward(i).min(axis=0)

    @property
    def least_ns(self) -> int | None:
        """F for all of the path; None if there is no way within the limit."""
        least = float(self.forward[0, 0])
        return int(least) if np.isfinite(least) else None

    def stops(self, core: Core) -> dict[int, Stop]:
        """The cheapest way: the blocks there when each stage begins, from 0, and the units that it runs."""
        there: list[set[int]] = [set() for _ in core.stages]
        runs: list[list[int]] = [[] for _ in core.stages]
        for made in self._decisions():
            for t in range(made.stage + 1, made.until + 1):
                there[t].add(made.last - 1)
            if made.stage >= 0:
                runs[made.stage] += [core.maker[b] for b in self.path.blocks[made.first - 1 : made.last]]
        return {t: Stop(tuple(sorted(there[t])), tuple(runs[t])) for t in range(len(core.stages))}

    def _decisions(self) -> Iterator[Advance]:
        """What is kept in the forward pass, and then what is run and kept as it goes back."""
        n = len(self.path.blocks)
        i, used, stack = 0, 0, list[tuple[int, int, int]]()
        while (choice := int(self._in_forward(i)[:, used].argmin())) > 0:
            k = i + choice
            yield Advance(k, k, -1, self._until(k, n))
            stack.append((i, k - 1, used))
            i, used = k, used + self.size[k]
        stack.append((i, n, used))
        while stack:
            i, j, used = stack.pop()
            if i == j:
                continue
            k = i + int(self._again(i, j)[:, used].argmin())
            if k == i:
                stack.append((i, j - 1, used))
                continue
            yield Advance(i + 1, k, self.path.run_in[j], self._until(k, j))
            stack += [(i, k - 1, used), (k, j, used + self.size[k])]

    def _until(self, k: int, j: int) -> int:
        """The last stage for which block k is kept, to go back over it from j."""
        own, *later = self.path.read_in[k : j + 1]
        return own if own >= 0 else max(later, default=-1)

    def _fill(self, i: int, j: int) -> None:
        self.table[i, j] = 0.0 if i == j else self._again(i, j).min(axis=0)
        shift = self.size[i]
        if shift < self.levels:
            self.kept[i, j, : self.levels - shift] = self.table[i, j, shift:]

    def _again(self, i: int, j: int) -> np.ndarray:
        """Cost by k - i and units; row 0 is to leave j alone."""
        ks = np.arange(i + 1, j + 1)
        rows = self.run[i, ks][:, None] + self.kept[ks, j] + self.table[i, ks - 1] + self.fits[ks]
        is_read = self.path.read_in[j] >= 0
        if self.for_plan and is_read:
            room = self.limit_bytes - self.path.before_bytes[j] - self._run_bytes(i, j)
            rows[np.arange(self.levels) * self.unit > room[:, None]] = np.inf
        return np.vstack((np.full(self.levels, np.inf) if is_read else self.table[i, j - 1], rows))

    def _run_bytes(self, i: int, j: int) -> np.ndarray:
        """The most that is there beside what is kept while i+1 to k run, for each k up to j."""
        read = [0, *self.path.size[i + 1 : j]]
        alive = np.array(read) + np.array(self.path.make_bytes[i + 1 : j + 1])
        most: np.ndarray = np.maximum.accumulate(alive)
        return most

    def _in_forward(self, i: int) -> np.ndarray:
        """The same in the forward pass, which runs all; row 0 is to keep nothing more."""
        n = len(self.path.blocks)
        rows = np.full((n - i + 1, self.levels), np.inf)
        rows[0] = self.table[i, n]
        for row, k in zip(rows[1:], range(i + 1, n + 1), strict=True):
            if (shift := self.size[k]) < self.levels:
                row[: self.levels - shift] = self.forward[k, shift:]
            row += self.table[i, k - 1] + self.fits[k]
        return rows


def reversal(problem: Problem, merged: Merged, gap: float, deadline: Deadline) -> tuple[Written | None, int]:
    """The cheapest plan for a plain chain that was found, and a lower bound on every plan's cost.

    None and 0 where the core has no such chain. No more is tried with a plan within ``gap`` of the bound, or
    once ``deadline`` is over.
    """
    assert problem.budget_bytes is not None
    core, asked, best = merged.core, problem.budget_bytes, None
    path = plain_chain(core)
    bound = Reversal(path, asked, for_plan=False).least_ns if path else None
    if path is None or bound is None:
        return None, 0
    chain = [(b,) for b in path.blocks]
    others = frozenset(range(len(core.block_bytes))) - core.held - {*path.blocks}
    for _ in range(TRIES):
        table = Reversal(path, asked, for_plan=True)
        spend(ENTRY_S * table.table.size * len(chain))
        if table.least_ns is None or (best and table.least_ns >= best.plan.cost_ns):
            break
        stops = table.stops(core)
        found = expand(problem, merged, along(core, chain, stops))
        if found.plan.peak_bytes <= problem.budget_bytes:
            found = spared(problem, found, deadline)
            best = min(filter(None, (best, found)), key=lambda w: w.plan.cost_ns)
        if (best and best.plan.cost_ns <= (1 + gap) * bound) or deadline.left() <= 0:
            break
        whole = expand(problem, merged, along(core, chain, stops, others))
        asked -= max(1, whole.plan.peak_bytes - problem.budget_bytes)
    return best, bound
