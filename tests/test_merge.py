"""Units merged, and small blocks left out: no optimum changes by the one, no bound breaks by the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import merge as merging
from rematc.solve import solve, solver
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.expand import restated
from rematc.solve.merge import merge, unmerged
from rematc.solve.reduce import reduce
from rematc.solve.refine import complete
from rematc.solve.search import search
from tests import oracle
from tests.graphs import budgets, problems, random_problem


@settings(max_examples=40)
@given(problems(ops=10))
def test_merging_leaves_every_block_that_backward_reads(problem: Problem) -> None:
    core = reduce(problem)
    merged = merge(core)
    read = {b for stage in core.stages for b in stage.reads}
    assert read <= set(merged.full_block)
    assert sum(len(parts) for parts in merged.parts) == len(core.units)
    assert sum(u.cost_ns for u in merged.core.units) == sum(u.cost_ns for u in core.units)


@settings(max_examples=40)
@given(problems(ops=9))
def test_merging_changes_no_optimum(problem: Problem) -> None:
    """A chain that runs apart can need less memory, never less time: costs agree where both have a plan."""
    for budget in budgets(problem)[1:]:
        asked = problem.with_budget(budget)
        full = reduce(asked, pauses=1)
        costs = []
        for merged in (unmerged(full), merge(full)):
            found = search(asked, merged, complete(merged.core), 0.0, Deadline.after(60)).best
            costs.append(None if found is None else found.plan.cost_ns)
        assert costs[1] is None or costs[0] == costs[1]


def test_what_is_small_leaves_the_bound_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are always saved count nothing for the bound, and all that they take for the plan."""
    monkeypatch.setattr(solver, "EXACT_OPS", 0)
    monkeypatch.setattr(merging, "SMALL", 0.5)
    left_out = 0
    for seed in range(200):
        problem = random_problem(seed)
        for budget in budgets(problem):
            asked = problem.with_budget(budget)
            best = oracle.search(asked)
            assert best is not None
            try:
                plan = solve(asked, SolveOptions(gap=0.0))
            except BudgetError:
                continue
            assert plan.bound_ns <= best.cost_ns <= plan.cost_ns
            left_out += len(merge(reduce(asked), budget - asked.base_bytes).small)
    assert left_out > 500


@settings(max_examples=40)
@given(problems(ops=12))
def test_a_plan_can_be_said_of_another_core(problem: Problem) -> None:
    whole = unmerged(reduce(problem))
    for budget in budgets(problem):
        written = drop(problem.with_budget(budget), whole)
        if written is not None:
            for merged in (whole, merge(whole.core), merge(whole.core, 100 * budget)):
                validate(problem, restated(problem, merged, written).plan)
            assert restated(problem, whole, written).plan.cost_ns == written.plan.cost_ns
