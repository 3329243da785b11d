"""Mend a draft that breaks the budget, and make one that keeps it cheaper, a few units at a time.

Large neighbourhood search (Shaw 1998): the decisions about most units stay as they are, so each MILP is
small. To mend, the units that matter where the budget is broken are free; to cheapen, those of one part of
the backward pass after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rematc.problem import Problem
from rematc.solve.decode import decode
from rematc.solve.expand import Draft, Written, excesses, expand
from rematc.solve.formulate import Formulation
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core
from rematc.solve.refine import Refined, build, refine

FREE = 40  # units that are free at the least
SLICE_S = 4.0
ROUNDS = 60


def improve(
    problem: Problem,
    merged: Merged,
    refined: Refined,
    written: Written,
    goal_ns: float,
    gap: float,
    deadline: float,
) -> Written | None:
    """The cheapest plan within the budget found from ``written`` on, until ``deadline`` or at ``goal_ns``."""
    assert problem.budget_bytes is not None
    near, refined = _Near(merged.core), refined.copy()
    best: Written | None = None
    sweep = near.sweep()
    f, size, n_free = build(problem, merged, refined, closures=False), refined.size, FREE
    for _ in range(ROUNDS):
        fits = written.plan.peak_bytes <= problem.budget_bytes
        if fits and (best is None or written.plan.cost_ns < best.plan.cost_ns):
            best = written
        left = deadline - time.monotonic()
        if left <= 0 or (best is not None and best.plan.cost_ns <= goal_ns):
            break
        if fits:
            free = next(sweep)
        else:
            refine(problem, merged, refined, written, strict=True)
            over = {t or 0 for _, t, _ in excesses(problem, written)}
            free = near.units(over, n_free)
        if refined.size != size:
            f, size = build(problem, merged, refined, closures=False), refined.size
        result = f.model.solve(gap=gap, time_limit_s=min(left, SLICE_S), fixed=_fixed(f, written.draft, free))
        if result.values is None:
            n_free *= 2
            continue
        written = expand(problem, merged, decode(f, result.values))
    return best


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
