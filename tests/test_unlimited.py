"""No limit: as fast as can be, but not at more memory than it takes without rematc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rematc.baselines import save_all
from rematc.options import SolveOptions
from rematc.partition import MUCH, _without_limit
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate
from rematc.unlimited import unlimited
from tests import graphs

OPTIONS = SolveOptions(time_limit_s=1)
PROBLEM = graphs.chain(12)
FASTEST, RESIDENT = unlimited(PROBLEM), PROBLEM.resident_bytes
MOST = RESIDENT + int(MUCH * (save_all(PROBLEM).peak_bytes - RESIDENT))


@dataclass
class Code:
    """Stands for what says what Inductor's code takes: ``more`` than the graph says."""

    problem: Problem
    more: Callable[[Plan], int]
    found: dict[Any, Any] = field(default_factory=dict)
    read_ready_made: frozenset[int] = frozenset()

    def __call__(self, plan: Plan) -> int:
        self.found[plan.saved, plan.backward] = self.problem.budget_bytes
        return simulate(PROBLEM, plan).peak_bytes + self.more(plan)

    def of_ops(self, plan: Plan) -> Mapping[int, Any]:
        return {}


def planned(more: Callable[[Plan], int]) -> tuple[Code, Plan]:
    code = Code(PROBLEM, more)
    problem, plan = _without_limit(PROBLEM, OPTIONS, code, None)  # type: ignore[arg-type]
    assert problem.budget_bytes is None and plan.budget_bytes is None
    assert plan.peak_bytes == simulate(PROBLEM, plan).peak_bytes + more(plan)
    return code, plan


def test_the_fastest_is_taken_where_its_code_takes_what_all_that_is_saved_would() -> None:
    _, plan = planned(lambda _: MOST - FASTEST.peak_bytes)
    assert (plan.saved, plan.backward) == (FASTEST.saved, FASTEST.backward)


def test_code_that_takes_more_is_that_of_another_plan() -> None:
    more = MOST + 1 - FASTEST.peak_bytes
    code, plan = planned(lambda plan: more if plan.saved == FASTEST.saved else 0)
    assert plan.saved != FASTEST.saved
    assert plan.peak_bytes <= FASTEST.peak_bytes
    # How its kernels are grouped, for so much, is known to who splits.
    assert code.found[plan.saved, plan.backward] == FASTEST.peak_bytes


def test_where_the_code_of_none_takes_less_it_is_the_fastest_after_all() -> None:
    _, plan = planned(lambda _: 2 * MOST)
    assert plan.saved == FASTEST.saved
