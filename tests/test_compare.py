"""The table of strategies: what it says, what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rematc.baselines import STRATEGIES, save_all
from rematc.compare import compare
from rematc.errors import BudgetError, OptionError, PlanError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged
from tests import oracle
from tests.graphs import chain


def best(problem: Problem, options: SolveOptions) -> Plan:
    """The exhaustive search, in the solver's place."""
    found, budget = oracle.search(problem), problem.budget_bytes
    if found is None:
        assert budget is not None
        raise BudgetError(budget, oracle.minimum_peak(problem), step="?", largest=())
    plan = replace(found.plan, bound_ns=found.cost_ns, status="optimal", strategy="rematc", solve_s=0.25)
    return judged(problem, plan)


def test_every_strategy_at_every_budget_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rematc.solve", SimpleNamespace(solve=best))
    rows = compare(chain(4), ["5B", 4, None]).rows
    assert [row.strategy for row in rows] == [*STRATEGIES, "rematc"] * 3
    assert [row.budget_bytes for row in rows[:: len(STRATEGIES) + 1]] == [5, 4, None]


def test_a_row_says_what_a_plan_needs_costs_and_misses() -> None:
    c = compare(chain(6), [5], [save_all, "sqrt_l", best])
    no, sqrt, own = c.rows
    assert (no.strategy, no.peak_bytes, no.fits, no.gap) == ("save_all", 7, False, None)
    assert (sqrt.peak_bytes, sqrt.cost_ns, sqrt.fits) == (5, 3, True)
    assert (own.cost_ns, own.status, own.gap, own.solve_s) == (2, "optimal", 0.0, 0.25)
    assert (sqrt.bound_ns, sqrt.gap, sqrt.cost_share) == (2, 0.5, 3 / 6)
    assert "50.0 %" in str(c)
    assert str(c).count("\n") == 4


def test_without_a_proof_there_is_no_gap() -> None:
    (row,) = compare(chain(4), [5], ["save_all"]).rows
    assert (row.bound_ns, row.gap, row.cost_ns) == (None, None, 0)


def test_a_budget_that_cannot_be_met_says_what_can() -> None:
    c = compare(chain(4), [3], [best, "save_all"])
    assert (c.rows[0].status, c.rows[0].minimum_bytes, c.rows[0].peak_bytes) == ("infeasible", 4, None)
    assert "infeasible: needs 4 B" in str(c)


def test_a_layerless_forward_pass_of_no_time_has_no_share() -> None:
    (row,) = compare(chain(4, ns=0), [5], ["recompute_all"]).rows
    assert row.cost_share is None


def test_an_unknown_strategy_lists_the_known() -> None:
    with pytest.raises(OptionError, match=r"'sqrt'.*save_all, .*sqrt_l, .*rematc"):
        compare(chain(2), [5], ["sqrt"])


def test_a_budget_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown unit"):
        compare(chain(2), ["5 potatoes"])


def test_a_bound_that_a_baseline_refutes_is_an_error() -> None:
    def too_sure(problem: Problem, options: SolveOptions) -> Plan:
        return replace(STRATEGIES["recompute_all"](problem, options), bound_ns=1, status="optimal")

    with pytest.raises(PlanError, match="no plan costs less than 1 ns, and save_all costs 0"):
        compare(chain(4), [5], ["save_all", too_sure])


def test_a_minimum_that_a_baseline_refutes_is_an_error() -> None:
    def too_shy(problem: Problem, options: SolveOptions) -> Plan:
        raise BudgetError(5, 6, step="b4", largest=())

    with pytest.raises(PlanError, match="no plan needs less than 6 bytes, and save_all needs 5"):
        compare(chain(4), [5], ["save_all", too_shy])


def test_a_plan_that_lies_is_not_shown() -> None:
    def liar(problem: Problem, options: SolveOptions) -> Plan:
        return replace(save_all(problem), peak_bytes=1)

    with pytest.raises(PlanError, match="claims a peak of 1 bytes"):
        compare(chain(4), [5], [liar])
