"""The smallest budget: a plan that meets it, and a bound that no plan is below, beside exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from benchmarks import corpus
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.solve import solve
from rematc.solve.deadline import Deadline
from rematc.solve.expand import expand, keep_all
from rematc.solve.lowest import lowest
from rematc.solve.merge import unmerged
from rematc.solve.reduce import reduce
from tests import oracle
from tests.graphs import problems


@pytest.mark.parametrize("name", [pytest.param("gpt2_24", marks=pytest.mark.slow), "vit"])
def test_the_smallest_budget_that_a_refusal_names_is_met(name: str) -> None:
    problem = corpus.load(name)
    with pytest.raises(BudgetError) as refused:
        solve(problem, SolveOptions(time_limit_s=1), budget_bytes=1)
    least = refused.value.minimum_bytes
    assert solve(problem, SolveOptions(time_limit_s=1), budget_bytes=least).peak_bytes <= least


@settings(max_examples=25)
@given(problems(ops=9))
def test_the_lowest_peak_is_bounded_from_below(problem: Problem) -> None:
    merged = unmerged(reduce(problem))
    start = expand(problem, merged, keep_all(merged.core))
    written, bound = lowest(problem, merged, start, Deadline.after(60))
    assert bound <= oracle.minimum_peak(problem) <= written.plan.peak_bytes


@settings(max_examples=25)
@given(problems(ops=9))
def test_so_it_is_where_there_was_no_time_to_find_the_lowest(problem: Problem) -> None:
    merged = unmerged(reduce(problem))
    start = expand(problem, merged, keep_all(merged.core))
    written, bound = lowest(problem.with_budget(1), merged, start, Deadline.after(-1))
    assert bound <= oracle.minimum_peak(problem) <= written.plan.peak_bytes
