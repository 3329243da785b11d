"""Solve the linear relaxation, add the cuts that its solution breaks, again.

First those by what ops ask for, which are most of it. Those by what is kept, or runs, make large programs
slow, which do without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rematc.solve.alike import Alike
from rematc.solve.clock import spend
from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation
from rematc.solve.model import Result
from rematc.solve.nearby import is_large
from rematc.solve.paths import Cut, add_cuts, broken, rows
from rematc.solve.relaxation import NONE_FIXED, Relaxation

LOOK_S = 3e-6  # of work, for each variable
ENOUGH = 2e-4  # of the bound: a round that gains less is the last
SLACK = 0.3  # a cut that has more does not matter

Cuts = dict[Cut, None]


def tighten(f: Formulation, cuts: Cuts, deadline: Deadline) -> Result:
    """The solution of the linear relaxation of ``f`` with all cuts that matter, which ``f`` has then.

    ``cuts`` are those known before, and in the end those that matter. The result is not ``finished`` if there
    is no solution by the ``deadline``.
    """
    n_rows = f.model.n_rows
    add_cuts(f, cuts)
    best = add_broken(f, cuts, deadline)
    if best.values is not None:
        _leave_tight(cuts, f, best.values)
        f.model.truncate(n_rows)
        add_cuts(f, cuts)
    return best


def add_broken(
    f: Formulation, cuts: Cuts, deadline: Deadline, fixed: Mapping[int, float] = NONE_FIXED
) -> Result:
    """Solve the relaxation of ``f``, which has ``cuts``, add to both those that it breaks, and again.

    The ``fixed`` variables don't move. Nothing is taken out. Returns the last solution.
    """
    relaxation, alike = Relaxation(f.model, fixed), Alike(f.core)
    best = relaxation.solve(deadline.left())
    for by_reads in (True,) if is_large(f) else (True, False):
        gain = math.inf
        while best.values is not None and gain > ENOUGH * abs(best.bound) and deadline.left() > 0:
            found = broken(f, best.values, by_reads=by_reads)
            spend(LOOK_S * len(best.values))
            new = rows(f, [each for each in alike.of(found) if each not in cuts])
            if fixed:
                new = {each: row for each, row in new.items() if any(x not in fixed for x, _ in row[0])}
            if not new:
                break
            cuts.update(dict.fromkeys(new))
            for row in new.values():
                f.model.row(*row)
            relaxation.add(list(new.values()))
            result = relaxation.solve(deadline.left())
            if result.values is None:
                return result if result.finished else best
            gain, best = result.bound - best.bound, result
    return best


def _leave_tight(cuts: Cuts, f: Formulation, values: Sequence[float]) -> None:
    """Those that ``values`` are far from breaking are taken out."""
    there = rows(f, cuts)
    for each in list(cuts):
        terms, upper = there.get(each, ((), math.inf))
        if upper - sum(c * values[x] for x, c in terms) > SLACK:
            del cuts[each]
