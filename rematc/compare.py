"""Every strategy at every budget, side by side: what it needs, what it costs, how far from the best."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from rematc.baselines import STRATEGIES, Strategy
from rematc.errors import BudgetError, OptionError, PlanError, format_bytes
from rematc.options import Budget, SolveOptions, parse_budget
from rematc.plan import Plan
from rematc.problem import Problem

OWN = "rematc"


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy at one budget.

    ``peak_bytes`` and ``cost_ns`` are None where there is no plan (``status`` "infeasible"; then
    ``minimum_bytes`` is the smallest budget that is accepted). ``cost_share`` is the cost over the time of
    the forward pass (None if that is zero). ``bound_ns`` is what any plan within this budget costs at
    least, as far as one of the strategies proved it, and ``gap`` (cost - bound) / bound, both
    None where nothing is proven or the plan does not fit: then the bound does not hold for it.
    """

    strategy: str
    budget_bytes: int | None
    fits: bool
    status: str
    solve_s: float
    peak_bytes: int | None = None
    cost_ns: int | None = None
    cost_share: float | None = None
    bound_ns: int | None = None
    gap: float | None = None
    minimum_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows, by budget in the order given, then by strategy; ``str()`` is a table of them.

    >>> print(Comparison((Row("save_all", 16, False, "baseline", 0.5, 28, 0, 0.0),)))
      budget  strategy    peak    fits      cost    of forward  bound    gap    status      solve s
    --------  ----------  ------  ------  ------  ------------  -------  -----  --------  ---------
        16 B  save_all    28 B    no        0 ms          0.0%  -        -      baseline       0.50
    """

    rows: tuple[Row, ...]
