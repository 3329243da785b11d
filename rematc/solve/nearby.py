"""A solution near the linear relaxation, in a fraction of the time that a MILP takes.

What the relaxation says of a unit in whole numbers, of all spans, stays as it is, and a small MILP decides
about the others: RENS (Berthold 2014), by units in place of variables. Where that is not near enough, those
around them are decided about too. Most of the time that HiGHS takes for the whole goes into cutting planes,
which matter for the bound, and little for where a plan breaks the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation
from rematc.solve.model import TOLERANCE, Result
from rematc.solve.reduce import Core

LARGE = 4000  # integer variables: cutting planes take long then
PATIENCE = 0.5  # of the time left after the relaxation
WIDER = 0, 1, 1, 2, 4  # so many units further each time
FEW = LARGE // 2  # variables to decide about: with more there is no end to it
NARROW, WHOLE = (0, 1), 0.1  # of a small program: how wide, and where no more of the units are fractions


def is_large(f: Formulation) -> bool:
    """Is a solution near the relaxation worth more than the MILP's, for the time that it takes?"""
    return sum(f.model.integer) > LARGE


def nearby(f: Formulation, relaxed: Result, gap: float, deadline: Deadline, node_limit: int) -> Result:
    """A solution near that of the relaxation, ``relaxed``, with its bound; without values if none is near.

    More units around those are decided about until it is within ``gap`` of the relaxation. ``finished`` is
    False where none was found, unless the relaxation itself has no solution. For a program that is not
    large, the MILP is not far: only where the relaxation is whole but for a few units is this tried.
    """
    if relaxed.values is None:
        return relaxed
    best, cost, free = None, math.inf, _split(f, relaxed.values)
    if not is_large(f) and len(free) > WHOLE * len(f.core.units):
        return Result(None, relaxed.bound, finished=False)
    for steps in WIDER if is_large(f) else NARROW:
        for _ in range(steps):
            free = _wider(f.core, free)
        fixed = {x: float(round(relaxed.values[x])) for x, u in f.unit_of.items() if u not in free}
        if steps and len(f.unit_of) - len(fixed) > FEW:
            break
        limit_s = PATIENCE * deadline.left()
        found = f.model.solve(gap=gap / 2, time_limit_s=limit_s, node_limit=node_limit, fixed=fixed)
        if found.values is not None and f.model.objective(found.values) < cost:
            best, cost = found.values, f.model.objective(found.values)
        if cost <= (1 + gap) * relaxed.bound + TOLERANCE or deadline.left() <= 0:
            break
    return Result(best, relaxed.bound, best is not None)


def _split(f: Formulation, values: Sequence[float]) -> frozenset[int]:
    """The units of which ``values`` say something between 0 and 1."""
    return frozenset(u for x, u in f.unit_of.items() if TOLERANCE < values[x] < 1 - TOLERANCE)


def _wider(core: Core, units: frozenset[int]) -> frozenset[int]:
    """``units``, what makes what they read, and what reads what they make."""
    before = (core.maker[b] for u in units for b in core.units[u].reads)
    after = (w for u in units for b in core.units[u].makes for w in core.readers[b])
    return units.union(before, after)
