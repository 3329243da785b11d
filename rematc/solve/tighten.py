"""Solve the linear relaxation, add the cuts that its solution breaks, again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rematc.solve.alike import Alike
from rematc.solve.deadline import Deadline
from rematc.solve.formulate import Formulation
from rematc.solve.model import Result
from rematc.solve.paths import Cut, add_cuts, broken, rows
from rematc.solve.relaxation import Relaxation

ENOUGH = 1e-4  # of the bound: a round that gains less gains nothing
PATIENCE = 2  # so many of those, and it is over
SLACK = 0.3  # a cut that has more does not matter

Cuts = dict[Cut, None]


def tighten(f: Formulation, cuts: Cuts, deadline: Deadline) -> Result:
    """The solution of the linear relaxation of ``f`` with all cuts that matter, which ``f`` has then.

    ``cuts`` are those known before, and in the end those that matter. The result is not ``finished`` if there
    is no solution by the ``deadline``.
    """
    n_rows, before, vain = f.model.n_rows, -math.inf, 0
    add_cuts(f, cuts)
    relaxation, alike, best = Relaxation(f.model), Alike(f.core), Result(None, -math.inf, False)
    while True:
        found = relaxation.solve(deadline.left())
        if found.values is None:
            best = found if found.finished else best
            break
        best = found
        more = {cut: None for cut in alike.of(broken(f, found.values)) if cut not in cuts}
        vain = vain + 1 if best.bound - before < ENOUGH * abs(best.bound) else 0
        if not more or vain == PATIENCE or deadline.left() <= 0:
            break
        before = best.bound
        cuts.update(more)
        relaxation.add(list(rows(f, more).values()))
    if best.values is not None:
        _leave_tight(cuts, f, best.values)
        f.model.truncate(n_rows)
        add_cuts(f, cuts)
    return best


def _leave_tight(cuts: Cuts, f: Formulation, values: Sequence[float]) -> None:
    """Those that ``values`` are far from breaking are taken out."""
    there = rows(f, cuts)
    for cut in list(cuts):
        terms, upper = there.get(cut, ((), math.inf))
        if upper - sum(c * values[x] for x, c in terms) > SLACK:
            del cuts[cut]
