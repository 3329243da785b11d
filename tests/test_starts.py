"""The plans to start from: which are looked for where those that are known are dear."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import corpus
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import starts
from rematc.solve.chain import plans_of_chains
from rematc.solve.deadline import Deadline
from rematc.solve.drop import drop
from rematc.solve.expand import Written, excesses, expand, keep_all
from rematc.solve.merge import Merged, merge
from rematc.solve.reduce import reduce
from rematc.solve.spare import spared
from rematc.solve.starts import first_plans
from tests.graphs import chain, save_all_peak


def part(problem: Problem, share: float) -> tuple[Problem, Merged, Written]:
    """With that share of its peak as the budget, as a core, and with all kept, which breaks it."""
    asked = problem.with_budget(int(share * save_all_peak(problem)))
    merged = merge(reduce(asked))
    return asked, merged, expand(asked, merged, keep_all(merged.core))


def forbid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(starts, name, lambda *_: pytest.fail(f"{name} was called"))


def test_in_a_general_graph_no_plan_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no forward pass to compare with; to mend what breaks the budget took a quarter of the time."""
    asked, merged, over = part(corpus.load("rand100_0"), 0.8)
    assert asked.forward_ns == 0
    forbid(monkeypatch, "mended")
    assert first_plans(asked, merged, 0, 0.01, Deadline.after(60), over).plans


@pytest.mark.parametrize(("times", "is_mended"), [(0.01, True), (100.0, False)])
def test_what_breaks_the_budget_is_mended_where_all_plans_are_dear(
    times: float, is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, merged, over = part(chain(24, ns=100), 0.5)
    given = list[Written]()

    def spied(_: Problem, written: Written, *__: object) -> None:
        given.append(written)

    monkeypatch.setattr(starts, "DEAR", times)
    monkeypatch.setattr(starts, "FINER", ())
    monkeypatch.setattr(starts, "mended", spied)
    monkeypatch.setattr(starts, "reversal", lambda *_: (None, 0))
    assert first_plans(asked, merged, 0, 0.01, Deadline.after(60), over).plans
    assert given == [over] * is_mended


def test_one_that_fits_needs_no_mending(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the lowest peak can fit where no level of bytes, rounded up, says so."""
    asked, _, over = part(chain(24, ns=100), 0.5)
    forbid(monkeypatch, "mended")
    roomy = asked.with_budget(over.plan.peak_bytes)
    assert starts._mended(roomy, over, 0.01, Deadline.after(60)) is over


def test_the_lowest_of_a_chain_is_mended_only_if_few_ops_are_over() -> None:
    asked, merged, _ = part(corpus.load("gpt2_4"), 0.8)
    low = plans_of_chains(asked, merged)[-1].lowest()
    assert low
    slightly, far = (
        replace(asked, budget_bytes=low.plan.peak_bytes - less) for less in (1, low.plan.peak_bytes)
    )
    assert 0 < len([*excesses(slightly, low)]) <= starts.FEW < len([*excesses(far, low)])
    assert starts._hardly_over(slightly, low) == low
    assert starts._hardly_over(far, low) is None
    assert starts._hardly_over(slightly, None) is None


@pytest.mark.parametrize("is_dear", [True, False])
def test_where_all_plans_are_dear_one_that_asks_once_is_looked_for(
    is_dear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MILP that overran its time left a diffusion transformer the plan from evicting, at twice the cost."""
    asked, merged, _ = part(chain(24, ns=100), 0.5)
    monkeypatch.setattr(starts, "DEAR", 0.01 if is_dear else 100.0)
    monkeypatch.setattr(starts, "reversal", lambda *_: (None, 0))
    given = list[float]()
    found = first_plans(
        asked, merged, 0, 0.01, Deadline.after(60), once=lambda limit: given.append(limit.left())
    )
    assert found.plans and len(given) == is_dear
    assert all(0 < left <= 15 for left in given)


@pytest.mark.parametrize("share", [0.75, 0.85, 0.95])
def test_each_is_spared_what_it_has_room_for_and_is_there_once(share: float) -> None:
    asked, merged, _ = part(corpus.load("gpt2_4"), share)
    found = first_plans(asked, merged, 0, 0.01, Deadline.after(60))
    costs = [written.plan.cost_ns for written in found.plans]
    assert costs == sorted(costs) and costs[-1] <= starts.HOPELESS * costs[0]
    assert len({(w.plan.saved, w.plan.backward) for w in found.plans}) == len(costs) <= starts.MOST
    for written in found.plans:
        validate(asked, written.plan)
        assert spared(asked, written, Deadline.after(60)).plan.cost_ns == written.plan.cost_ns
    dropped = drop(asked, merged)
    assert dropped is None or (found.greedy and found.greedy.plan.cost_ns <= dropped.plan.cost_ns)


def test_the_lowest_of_a_chain_that_fits_is_one_to_start_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a U-Net for diffusion it led to a plan of half the cost, once spared what it had room for."""
    asked, merged, _ = part(corpus.load("gpt2_4"), 0.8)
    for other in ("drop", "evict", "cheapest"):
        monkeypatch.setattr(starts, other, lambda *_: None)
    monkeypatch.setattr(starts, "reversal", lambda *_: (None, 0))
    monkeypatch.setattr(starts, "_are_dear", lambda *_: False)
    low = plans_of_chains(asked, merged)[-1].lowest()
    (found,) = first_plans(asked, merged, 0, 0.01, Deadline.after(60)).plans
    assert low and found.plan.cost_ns < low.plan.cost_ns
