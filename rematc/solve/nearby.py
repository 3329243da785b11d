"""A solution near the linear relaxation, in a fraction of the time that a MILP takes.

What the relaxation says of a unit in whole numbers, of all spans, stays as it is, and a small MILP decides
about the others: RENS (Berthold 2014), by units in place of variables. Most of the time that HiGHS takes for
the whole goes into cutting planes, which matter for the bound, and little for where a plan breaks the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation
from rematc.solve.model import TOLERANCE, Result

LARGE = 4000  # integer variables: cutting planes take long then
PATIENCE = 0.5  # of the time left after the relaxation


def is_large(f: Formulation) -> bool:
    """Is a solution near the relaxation worth more than the MILP's, for the time that it takes?"""
    return sum(f.model.integer) > LARGE


def nearby(f: Formulation, gap: float, deadline: Deadline, node_limit: int) -> Result:
    """A solution near that of the relaxation, whose bound it has; if none is near, `Result.values` is None.

    ``finished`` is False then, unless the relaxation itself has no solution.
    """
    relaxed = f.model.relaxed().solve(gap=0.0, time_limit_s=deadline.left())
    if relaxed.values is None:
        return relaxed
    fixed = _whole(f, relaxed.values)
    limit_s = PATIENCE * deadline.left()
    found = f.model.solve(gap=gap, time_limit_s=limit_s, node_limit=node_limit, fixed=fixed)
    return Result(found.values, relaxed.bound, found.values is not None)


def _whole(f: Formulation, values: Sequence[float]) -> dict[int, float]:
    """The variables of units of which ``values`` say nothing but 0 and 1."""
    unit_of = f.unit_of
    split = {u for x, u in unit_of.items() if TOLERANCE < values[x] < 1 - TOLERANCE}
    return {x: float(round(values[x])) for x, u in unit_of.items() if u not in split}
