"""The loop around the solver: what the code needs decides, and what is refused is honest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematc.baselines import save_all
from rematc.errors import BudgetError
from rematc.fit import NOTE, fit
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate, validate
from rematc.solve import solve
from tests import graphs

OPTIONS = SolveOptions(time_limit_s=1)


class Code:
    """Stands for a compiler: a plan's code needs ``times`` what the graph says, and ``more``.

    What is taken between the passes is not the code's, and stays.
    """

    def __init__(self, problem: Problem, times: float, more: int) -> None:
        self.problem, self.times, self.more = problem, times, more
        self.lowered = 0

    def __call__(self, plan: Plan) -> int:
        self.lowered += 1
        resident = self.problem.resident_bytes
        inside = simulate(replace(self.problem, meanwhile_bytes=0), plan).peak_bytes - resident
        between = simulate(self.problem, plan).between_bytes if self.problem.meanwhile_bytes else 0
        return max(between, resident + max(0, int(inside * self.times) + self.more))


def chain(budget_bytes: int) -> Problem:
    return graphs.chain(6).with_budget(budget_bytes)


factors = st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0])
extras = st.integers(-3, 9)


@given(graphs.problems(), factors, extras, st.floats(0, 1))
def test_the_code_of_what_is_accepted_fits_and_the_refusal_names_a_budget_that_is_accepted(
    problem: Problem, times: float, more: int, share: float
) -> None:
    code = Code(problem, times, more)
    high = code(save_all(problem))
    limited = problem.with_budget(max(1, int(share * high)))
    try:
        found = fit(limited, OPTIONS, code)
    except BudgetError as e:
        refused = e
        limited = problem.with_budget(e.minimum_bytes)
        found = fit(limited, OPTIONS, code)
        assert refused.minimum_bytes > refused.budget_bytes
    assert found.plan.peak_bytes == code(found.plan) <= (limited.budget_bytes or 0)
    validate(found.problem, found.plan)


def test_code_that_needs_what_the_graph_says_is_lowered_once() -> None:
    problem = chain(solve(chain(10**9), OPTIONS).peak_bytes - 1)
    code = Code(problem, 1.0, 0)
    found = fit(problem, OPTIONS, code)
    assert found.problem == problem
    assert found.plan.cost_ns == solve(problem, OPTIONS).cost_ns


def test_room_that_the_code_leaves_is_used() -> None:
    free = solve(chain(10**9), OPTIONS)
    problem = chain(free.peak_bytes - 1)
    assert solve(problem, OPTIONS).cost_ns > 0
    assert fit(problem, OPTIONS, Code(problem, 0.9, 0)).plan.cost_ns == 0


def test_without_a_limit_nothing_is_recomputed_and_the_peak_is_that_of_the_code() -> None:
    problem = graphs.chain(6)
    found = fit(problem, OPTIONS, Code(problem, 2.0, 5))
    assert found.plan.cost_ns == 0
    assert found.plan.peak_bytes == 2 * solve(problem, OPTIONS).peak_bytes + 5


def test_a_budget_that_only_the_graph_fits_is_refused() -> None:
    with pytest.raises(BudgetError) as least:
        solve(chain(1), OPTIONS)
    problem = chain(least.value.minimum_bytes)
    with pytest.raises(BudgetError) as refused:
        fit(problem, OPTIONS, Code(problem, 1.0, 3))
    assert refused.value.minimum_bytes == least.value.minimum_bytes + 3


def test_a_refusal_searches_for_the_smallest_budget_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def counted(problem: Problem, options: SolveOptions, known: Plan | None) -> Plan:
        asked.append(problem.budget_bytes)
        assert (known is None) == (problem.budget_bytes == 1)  # the second has what the first found
        return solve(problem, options, known=known)

    monkeypatch.setattr("rematc.fit.solve", counted)
    problem = chain(1)
    with pytest.raises(BudgetError) as refused:
        fit(problem, OPTIONS, Code(problem, 1.0, 0))
    assert asked == [1, refused.value.minimum_bytes]  # then for the cheapest that is as low
    plan = refused.value.plan
    assert validate(problem.with_budget(plan.peak_bytes), plan).peak_bytes == refused.value.minimum_bytes


def test_of_the_plans_that_are_as_low_the_cheapest_is_taken() -> None:
    """The refusal's plan has the lowest peak, and may recompute more than another that fits as well."""
    with pytest.raises(BudgetError) as least:
        solve(chain(1), OPTIONS)
    problem = chain(least.value.minimum_bytes + 3)
    found = fit(problem, OPTIONS, Code(problem, 1.0, 3))
    assert found.plan.cost_ns <= least.value.plan.cost_ns
    assert found.plan.cost_ns == solve(chain(least.value.minimum_bytes), OPTIONS).cost_ns


def test_of_the_plans_that_are_as_low_the_one_whose_code_needs_less_is_what_a_refusal_names() -> None:
    """A GPT-2's cheapest plan of the lowest peak needs 1 % less than the first one, a BERT's 4 %."""
    with pytest.raises(BudgetError) as least:
        solve(chain(1), OPTIONS)
    floor, problem = least.value.plan, chain(least.value.minimum_bytes - 3)
    cheapest = solve(chain(floor.peak_bytes), OPTIONS)
    assert cheapest.cost_ns < floor.cost_ns

    def code(plan: Plan) -> int:
        return simulate(problem, plan).peak_bytes + (5 if plan.backward == floor.backward else -1)

    with pytest.raises(BudgetError) as refused:
        fit(problem, OPTIONS, code)
    assert refused.value.minimum_bytes == floor.peak_bytes - 1
    assert refused.value.plan.backward == cheapest.backward


def test_what_makes_all_anew_is_not_lowered_where_another_plan_is_as_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes as much longer as it has more ops."""
    with pytest.raises(BudgetError) as least:
        solve(chain(1), OPTIONS)
    floor, problem = least.value.plan, chain(least.value.minimum_bytes - 3)
    cheapest = solve(chain(floor.peak_bytes), OPTIONS)
    for long, lowered in ((1.0, [cheapest.backward]), (9.0, [cheapest.backward, floor.backward])):
        monkeypatch.setattr("rematc.fit.LONG", long * len(floor.backward) / len(cheapest.backward) - 0.01)
        asked = []
        with pytest.raises(BudgetError):
            fit(problem, OPTIONS, lambda plan, asked=asked: asked.append(plan.backward) or plan.peak_bytes)
        assert asked == lowered
    asked.clear()
    fit(problem, OPTIONS, lambda plan: asked.append(plan.backward) or problem.budget_bytes)
    assert asked[0] == cheapest.backward and floor.backward not in asked


def test_room_that_the_code_leaves_below_the_smallest_budget_of_the_graph_is_used() -> None:
    with pytest.raises(BudgetError) as least:
        solve(chain(1), OPTIONS)
    lowest = least.value.minimum_bytes
    problem = chain(lowest - 1)
    found = fit(problem, OPTIONS, Code(problem, 1.0, -2)).plan
    assert found.cost_ns == solve(chain(lowest + 1), OPTIONS).cost_ns < solve(chain(lowest), OPTIONS).cost_ns


def test_a_refusal_is_of_the_budget_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the search for a cheaper plan of the lowest peak, cut short, finds none."""
    problem = chain(1)
    with pytest.raises(BudgetError) as least:
        solve(problem, OPTIONS)

    def cut_short(problem: Problem, options: SolveOptions, known: Plan | None) -> Plan:
        refused = BudgetError(problem.budget_bytes or 0, least.value.minimum_bytes, step="", largest=())
        refused.plan = least.value.plan
        raise refused

    monkeypatch.setattr("rematc.fit.solve", cut_short)
    with pytest.raises(BudgetError) as refused:
        fit(problem, OPTIONS, Code(problem, 1.0, 2))
    found = refused.value
    assert (found.budget_bytes, found.minimum_bytes) == (1, least.value.minimum_bytes + 2)
    assert found.__context__ is None


def test_a_plan_for_the_smallest_budget_says_how_good_it_is_and_how_long_it_took() -> None:
    """It said that its gap is infinite, and that it was found in no time; a U-Net's took minutes."""
    with pytest.raises(BudgetError) as least:
        solve(chain(1), OPTIONS)
    floor, problem = least.value.plan, chain(least.value.minimum_bytes - 1)

    def code(plan: Plan) -> int:
        return simulate(problem, plan).peak_bytes + (-1 if plan.backward == floor.backward else 5)

    plan = fit(problem, OPTIONS, code).plan
    assert 0 < plan.bound_ns <= plan.cost_ns
    assert plan.solve_s > 0


def test_what_recomputes_nothing_is_optimal_though_the_graph_alone_would_not_fit() -> None:
    short = graphs.chain(1)
    problem = short.with_budget(solve(short, OPTIONS).peak_bytes - 1)
    plan = fit(problem, OPTIONS, Code(problem, 0.5, 0)).plan
    assert (plan.cost_ns, plan.gap, plan.status) == (0, 0.0, "optimal")


def test_the_bound_is_the_lowest_that_was_met() -> None:
    """With the room that the code leaves, less is recomputed: then less is proven, and no more claimed."""
    free = solve(chain(10**9), OPTIONS)
    problem = chain(free.peak_bytes - 2)
    first, code = solve(problem, OPTIONS), Code(problem, 1.0, -1)
    found = fit(problem, OPTIONS, code)
    assert code.lowered > 1
    assert found.plan.bound_ns <= solve(problem.with_budget(free.peak_bytes - 1), OPTIONS).bound_ns
    assert found.plan.bound_ns <= first.bound_ns
    assert NOTE in found.plan.notes
    validate(found.problem, found.plan)


def test_what_the_lowest_bound_leaves_open_is_not_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round proves less than the first, and finds nothing worth lowering."""
    problem = chain(solve(chain(10**9), OPTIONS).peak_bytes - 2)
    plan = solve(problem, OPTIONS)
    bounds = iter([plan.bound_ns, 0])

    def solver(asked: Problem, _: SolveOptions, known: Plan | None) -> Plan:
        return replace(plan, peak_bytes=simulate(asked, plan).peak_bytes, digest="", bound_ns=next(bounds))

    monkeypatch.setattr("rematc.fit.solve", solver)
    found = fit(problem, OPTIONS, Code(problem, 0.5, 0)).plan
    assert (found.bound_ns, found.status) == (0, "feasible")


def test_a_given_plan_is_taken_if_its_code_fits_and_else_another_is_looked_for() -> None:
    free = solve(chain(10**9), OPTIONS)
    problem = chain(free.peak_bytes + 1)
    fits, exceeds = Code(problem, 1.0, 1), Code(problem, 1.0, 2)
    assert fit(problem, OPTIONS, fits, free).plan.saved == free.saved
    assert fits.lowered == 1
    found = fit(problem, OPTIONS, exceeds, free)
    assert found.plan.cost_ns > 0
    assert found.plan.peak_bytes == exceeds(found.plan) <= problem.budget_bytes


@pytest.mark.parametrize(("share", "least"), [(0.1, 0.0), (0.2, 0.1), (0.4, 0.25)])
def test_code_that_needs_no_less_for_less_is_not_answered_by_the_lowest_peak(
    share: float, least: float
) -> None:
    """A kernel that Inductor fused needed the same in each round, and the step took ten forward passes."""
    problem = graphs.chain(24)
    with pytest.raises(BudgetError) as refused:
        solve(problem.with_budget(1), OPTIONS)
    floor, free = refused.value.minimum_bytes, save_all(problem).peak_bytes
    limited = problem.with_budget((floor + free) // 2)
    edge, seen = floor + int(share * (free - floor)), list[int]()

    def code(plan: Plan) -> int:
        seen.append(simulate(problem, plan).peak_bytes)
        return seen[-1] if seen[-1] <= edge else (limited.budget_bytes or 0) + 1

    found = fit(limited, OPTIONS, code)
    assert floor + least * (free - floor) < found.plan.peak_bytes <= edge < max(seen)
    assert found.plan.cost_ns < solve(problem.with_budget(floor), OPTIONS).cost_ns
    assert len(seen) <= 5


def test_between_the_last_plan_and_the_smallest_none_is_lowered_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of a ResNet-50 took more than half an hour to lower. Larger budgets are tried in its place."""
    problem = graphs.chain(24)
    with pytest.raises(BudgetError) as refused:
        solve(problem.with_budget(1), OPTIONS)
    floor, free = refused.value.minimum_bytes, save_all(problem).peak_bytes
    limited, asked = problem.with_budget((floor + free) // 2), list[int]()

    def noted(problem: Problem, options: SolveOptions, known: Plan | None) -> Plan:
        asked.append(problem.budget_bytes or 0)
        return solve(problem, options, known=known)

    def code(plan: Plan) -> int:
        lowered.append(simulate(problem, plan).peak_bytes)
        return lowered[-1] if lowered[-1] == floor else (limited.budget_bytes or 0) + 1

    monkeypatch.setattr("rematc.fit.solve", noted)
    monkeypatch.setattr("rematc.fit.LONG", 0)
    lowered = list[int]()
    assert fit(limited, OPTIONS, code).plan.peak_bytes == floor
    first = asked.index(1) + 1
    assert floor < asked[first] < asked[first + 1] < (limited.budget_bytes or 0)
    assert all(peak == floor or peak > asked[first + 1] for peak in lowered)
