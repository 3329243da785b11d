"""Make a plan cheaper where it has room: what it makes again stays instead, since it was there before.

Greedy, without a MILP: the run is spared first that saves most time for the bytes that stay meanwhile. With
it go those that were for it alone, so that of a plan that makes all anew for each stage little is left. How
long a block stays counts by its root: room is short in few places, and a long way crosses hardly more.

A plan is read as runs of units, and as copies of blocks: each run makes its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from rematc.problem import Problem
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.expand import Draft, Written, expand
from rematc.solve.merge import Merged

TRIES = 5  # each with twice as much less room
ALONE = 200  # runs that are for one alone, and are counted: with more it is worth most anyway
STEP_S, LOOK_S, TRY_S = 5e-6, 7e-7, 5e-6  # of work: for a step of the plan, a copy looked at, a run tried


def spared(problem: Problem, written: Written, deadline: Deadline) -> Written:
    """``written``, which keeps to the budget, without the runs that there is room to do without.

    >>> from rematc.exchange import from_networkx
    >>> import networkx
    >>> from rematc.solve.merge import unmerged
    >>> from rematc.solve.reduce import reduce
    >>> dag = networkx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    >>> for node in "abcd":
    ...     dag.add_node(node, bytes=10, runtime_ns=7)
    >>> problem = from_networkx(dag).with_budget(30)
    >>> again = Draft(frozenset(), ((), (), (0, 1), (0, 1, 2), ()))  # a and b for c, and all for d
    >>> written = expand(problem, unmerged(reduce(problem)), again)
    >>> written.plan.cost_ns, spared(problem, written, Deadline.after(1.0)).plan.cost_ns
    (35, 0)
    """
    assert problem.budget_bytes is not None
    less = 0  # room: a view, be it beside a result, can hold what stays no longer
    for _ in range(TRIES):
        if deadline.left() <= 0:
            break
        draft = _Sparing(problem, written, problem.budget_bytes - less, deadline).draft()
        found = expand(problem, written.merged, draft)
        excess = found.plan.peak_bytes - problem.budget_bytes
        if excess <= 0:
            return min(written, found, key=lambda w: w.plan.cost_ns)
        less = max(2 * less, less + excess)
    return written


class _Run:
    """A unit that runs, in ``stage`` of the backward pass; None where no plan does without that run."""

    __slots__ = ("is_gone", "makes", "part", "reads", "stage", "steps", "unit")

    def __init__(self, unit: int, stage: int | None) -> None:
        self.unit, self.stage = unit, stage
        self.part = -1  # the last that ran
        self.steps: list[int] = []
        self.makes: list[_Copy] = []
        self.reads: list[_Copy] = []
        self.is_gone = False

    @property
    def is_idle(self) -> bool:
        """Can it go, and does nothing read what it makes?"""
        return self.stage is not None and not (self.is_gone or any(copy.reads for copy in self.makes))


class _Copy:
    """A block that ``run`` makes at ``step``, and where it is read; ``before`` is the one made before."""

    __slots__ = ("before", "block", "in_time", "reads", "run", "step")

    def __init__(self, block: int, step: int, run: _Run, before: _Copy | None) -> None:
        self.block, self.step, self.run, self.before = block, step, run, before
        self.reads: dict[_Run | int, int] = {}  # the last step, by the run or the stage whose op reads it
        self.in_time: list[_Run | int] = []  # those that read it, or did, from the first to the last

    @property
    def last(self) -> int:
        """The last step at which it is needed."""
        while self.in_time and self.in_time[-1] not in self.reads:
            self.in_time.pop()
        return self.reads[self.in_time[-1]] if self.in_time else self.step

    def read_by(self, reader: _Run | int, step: int) -> None:
        """``reader`` reads it at ``step``, after all others."""
        self.reads[reader] = step
        if self.in_time[-1:] != [reader]:
            self.in_time.append(reader)

    def stays_for(self, later: _Copy) -> None:
        """Who read ``later`` reads this from now on."""
        for reader in later.reads:
            if isinstance(reader, _Run):
                reader.reads[reader.reads.index(later)] = self
        self.reads.update(later.reads)
        self.in_time += later.in_time
        later.reads.clear()

    @property
    def earlier(self) -> _Copy | None:
        """The one before it that is there."""
        while self.before and self.before.run.is_gone:
            self.before = self.before.before
        return self.before


Stay = tuple[_Copy, _Copy]  # a copy to do without, and the one before it that stays until then


class _Sparing:
    """The plan as runs and copies, and the bytes alive at each step, of which none may exceed ``limit``."""

    def __init__(self, problem: Problem, written: Written, limit: int, deadline: Deadline) -> None:
        self.merged, self.limit, self.deadline = written.merged, limit, deadline
        self.size = self.merged.core.block_bytes
        profile, self.forward_end = written.profile, len(written.profile.steps) - len(written.stages)
        live = [*profile.live_bytes]
        live.insert(self.forward_end, profile.between_bytes if problem.meanwhile_bytes else 0)
        self.live = np.array(live, dtype=np.int64)
        self.runs, self.saved = list[_Run](), list[_Copy]()
        self._read(written)
        spend(STEP_S * len(live))

    def draft(self) -> Draft:
        """What is left once nothing more can be spared, or the time is over."""
        before = None
        while len(self.runs) != before and self.deadline.left() > 0:
            before = len(self.runs)
            self._sweep()
            self.runs = [run for run in self.runs if not run.is_gone]
        runs: list[list[int]] = [[] for _ in self.merged.core.stages]
        for run in self.runs:
            if run.stage is not None and not run.is_gone:
                runs[run.stage].append(run.unit)
        saved = frozenset(copy.block for copy in self.saved if copy.last > self.forward_end)
        return Draft(saved, tuple(map(tuple, runs)))

    def _read(self, written: Written) -> None:
        """Find the runs and copies in the steps of the plan."""
        steps, core = written.profile.steps, self.merged.core
        reader, ops = _Reader(self.merged), [step.op for step in steps]
        for n, op in enumerate(ops[: self.forward_end]):
            reader.step(op, None, n)
        self.saved = [*reader.now.values()]
        by_stage: list[list[int]] = [[] for _ in core.stages]
        for n, t in enumerate(written.stages, self.forward_end):
            by_stage[t].append(n)
        end = self.forward_end + 1
        for t, stage in enumerate(core.stages):
            for n in by_stage[t]:
                reader.step(ops[n], t, n + 1)
                end = n + 1
                if ops[n] == stage.op and stage.unit is None:
                    reader.read(stage.reads, t, end)
            if stage.op is None:
                reader.read(stage.reads, t, end)
        self.runs = [run for run in reader.runs if run.stage is not None]

    def _sweep(self) -> None:
        """Try each run once, the one first that is worth most."""
        worth = [(-w, n) for n, run in enumerate(self.runs) if (w := self._worth(run)) is not None]
        heapq.heapify(worth)
        while worth and self.deadline.left() > 0:
            _, n = heapq.heappop(worth)
            now = self._worth(self.runs[n])  # others went meanwhile
            if now is None:
                continue
            if worth and -now > worth[0][0]:
                heapq.heappush(worth, (-now, n))
            elif self._has_room(stays := self._stays(self.runs[n])):
                self._spare(self.runs[n], stays)

    def _stays(self, run: _Run) -> list[Stay]:
        """For each copy that ``run`` makes and is read, the one before; none where one has none before."""
        pairs = [(copy, copy.earlier) for copy in run.makes if copy.reads]
        found = [(copy, earlier) for copy, earlier in pairs if earlier]
        return found if len(found) == len(pairs) else []

    def _worth(self, run: _Run) -> float | None:
        """Time that is saved without ``run``, for the bytes that stay and the root of for how many steps."""
        stays = [] if run.is_gone else self._stays(run)
        if not stays:
            return None
        spend(TRY_S)
        room = sum(self.size[copy.block] * max(0, copy.step - kept.last) ** 0.5 for copy, kept in stays)
        return self._saves_ns(run) / max(1.0, room)

    def _saves_ns(self, run: _Run) -> int:
        """The time of ``run`` and of those that are for it alone."""
        gone, stack, cost_ns, looked = {run}, [run], 0, 1
        while stack and len(gone) < ALONE:
            one = stack.pop()
            cost_ns += self.merged.core.units[one.unit].cost_ns
            for copy in one.reads:
                maker, looked = copy.run, looked + 1
                if maker.stage is None or maker in gone:
                    continue
                if all(reader in gone for made in maker.makes for reader in made.reads):
                    gone.add(maker)
                    stack.append(maker)
        spend(LOOK_S * looked)
        return cost_ns

    def _has_room(self, stays: list[Stay]) -> bool:
        """Is there room? If so it is taken."""
        for copy, kept in stays:
            self.live[kept.last + 1 : copy.step] += self.size[copy.block]
        fits = all(self.live[kept.last + 1 : copy.step].max(initial=0) <= self.limit for copy, kept in stays)
        for copy, kept in () if fits else stays:
            self.live[kept.last + 1 : copy.step] -= self.size[copy.block]
        return fits

    def _spare(self, run: _Run, stays: list[Stay]) -> None:
        """Leave ``run`` out, and what only ran for it."""
        for copy, kept in stays:
            kept.stays_for(copy)
        stack = [run]
        while stack:
            gone = stack.pop()
            if gone.is_idle:
                gone.is_gone = True
                self.live[gone.steps] = 0  # no step any more
                spend(TRY_S + LOOK_S * len(gone.reads))
                for copy in gone.reads:
                    until = copy.last
                    del copy.reads[gone]
                    self.live[copy.last + 1 : until + 1] -= self.size[copy.block]
                    stack.append(copy.run)


class _Reader:
    """Reads steps one after the other: which copy of each block is there ``now``."""

    def __init__(self, merged: Merged) -> None:
        self.units, self.stages = merged.full.units, merged.core.stages
        blocks = ((b, n) for n, b in enumerate(merged.full_block))
        self.number = {b: n for b, n in blocks if n not in merged.core.held}  # those are there anyway
        self.part = {self.units[p].op: (u, p) for u, parts in enumerate(merged.parts) for p in parts}
        self.now: dict[int, _Copy] = {}
        self.latest: dict[int, _Run] = {}  # by unit
        self.runs: list[_Run] = []

    def step(self, op: int, stage: int | None, step: int) -> None:
        """At ``step`` runs ``op``; that matters if it is a part of a unit."""
        if op not in self.part:
            return
        u, p = self.part[op]
        is_first = stage is not None and self.stages[stage].unit == u
        run = self.latest.get(u)
        if run is None or run.stage != (None if is_first else stage) or p <= run.part:
            run = self.latest[u] = _Run(u, None if is_first else stage)
            self.runs.append(run)
        run.part = p
        run.steps.append(step)
        self.read(self._known(self.units[p].reads), run, step)
        for b in self._known(self.units[p].makes):
            self.now[b] = copy = _Copy(b, step, run, self.now.get(b))
            run.makes.append(copy)

    def read(self, blocks: Iterable[int], reader: _Run | int, step: int) -> None:
        """At ``step`` ``reader`` reads ``blocks``."""
        for b in blocks:
            copy = self.now.get(b)
            if copy and copy.run is not reader:
                if isinstance(reader, _Run) and reader not in copy.reads:
                    reader.reads.append(copy)
                copy.read_by(reader, step)

    def _known(self, blocks: Iterable[int]) -> Iterator[int]:
        """Those of the full core that are blocks of the merged one, by its numbers."""
        return (self.number[b] for b in blocks if b in self.number)
