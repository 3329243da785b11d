"""A step of several graphs, by graph breaks or block by block: one budget for all, and the same gradients."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

import rematc
from rematc.baselines import recompute_all, save_all
from rematc.compiled import Given, Made
from rematc.measure import measure
from rematc.options import Options
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.share import Footprint, use_of
from rematc.simulate import judged
from rematc.survey import Outside
from rematc.threads import Threads
from tests.blocks import Model, batch, count_compiles, gradients, made, one_node, peak, resident, step_of
from tests.graphs import chain

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # Dynamo's own, where the input of a graph is the result of another.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.mark.parametrize(
    ("how", "budget"),
    [
        ("graph break", 1_200_000),
        ("blocks", 1_200_000),
        ("blocks", 1_400_000),
        ("a backend for each", 1_400_000),
    ],
)
def test_the_budget_holds_for_all_graphs_together(how: str, budget: int) -> None:
    model, alone = made(how, rematc.backend(None, inner="eager"))
    step_of(model, alone)()
    free, expected = peak(model, alone), gradients(model, alone)
    torch._dynamo.reset()
    backend = rematc.backend(budget, inner="eager")
    model, run = made(how, backend)
    for _ in range(2):
        step_of(model, run)()
    measured = [peak(model, run) for _ in range(2)]
    assert max(measured) <= budget < free
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, run), expected, strict=True))
    if how != "a backend for each":
        assert len(backend.plans) == 2
        assert max(measured) <= max(plan.peak_bytes for plan in backend.plans) <= budget
        assert sum(plan.cost_ns for plan in backend.plans) > 0


@pytest.mark.parametrize("how", ["graph break", "blocks"])
def test_the_optimizer_s_state_is_kept_free_for_the_parameters_of_all_calls(how: str) -> None:
    """One graph may serve many blocks, and several graphs have parameters of their own."""
    there = []
    for optimizer in (None, torch.optim.AdamW):
        torch._dynamo.reset()
        backend = rematc.backend("10MB", inner="eager", optimizer=optimizer, reserve=1000)
        model, run = made(how, backend)
        for _ in range(2):
            step_of(model, run)()
        there.append(backend.resident_bytes)
    run(batch()).backward()
    used = torch.optim.AdamW(model.parameters())
    used.step()
    tensors = [t for state in used.state.values() for t in state.values()]
    assert there[1] - there[0] == sum(t.numel() * t.element_size() for t in tensors)
    assert there[0] == resident(model) + 1000


def test_under_inductor_too() -> None:
    backend = rematc.backend(1_150_000)
    model, run = made("blocks", backend)
    expected = gradients(model, Model.forward.__get__(model))
    for _ in range(2):
        step_of(model, run)()
    assert peak(model, run) <= max(plan.peak_bytes for plan in backend.plans) <= 1_150_000
    for ours, theirs in zip(gradients(model, run), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def in_turns(run: Callable[[Tensor], Tensor], most: int) -> None:
    """A stage of a pipeline (1F1B): up to ``most`` batches have run forward and not back."""
    still: deque[Tensor] = deque()
    for _ in range(2 * most):
        still.append(run(batch()))
        if len(still) == most:
            still.popleft().backward()
    while still:
        still.popleft().backward()


@pytest.mark.parametrize("most", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_in_turns_are_planned_for_as_many_as_are_open_at_once(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Model()

    def peak_in_turns(budget: int) -> tuple[int, int]:
        """Measured and predicted."""
        torch._dynamo.reset()
        backend = rematc.backend(budget, inner="eager", costs="roofline")
        run = torch.compile(model, backend=backend)
        model.zero_grad()
        for _ in range(3):
            in_turns(run, most)
            assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
            resident = backend.resident_bytes
            model.zero_grad()
            assert backend.resident_bytes == resident  # those of the next step, which meet its open calls
        there = sum(4 * p.numel() for p in model.parameters())
        measured = there + measure(lambda: in_turns(run, most)).peak_bytes
        return measured, backend.plans[0].peak_bytes

    in_turns(model, most)
    expected = [p.grad for p in model.parameters()]
    free, _ = peak_in_turns(10**9)
    for share in (0.9, 0.6):
        measured, predicted = peak_in_turns(int(share * free))
        assert measured <= predicted <= share * free
    assert "are held" not in caplog.text


@pytest.mark.parametrize("how", ["graph break", "blocks"])
def test_a_budget_that_is_too_small_for_all_is_refused_with_one_that_is_not(how: str) -> None:
    model, run = made(how, rematc.backend(700_000, inner="eager"))
    step_of(model, run)()
    with pytest.raises(rematc.BudgetError, match="graphs in one step") as refused:
        step_of(model, run)()
    torch._dynamo.reset()
    least = refused.value.minimum_bytes
    model, run = made(how, rematc.backend(least, inner="eager"))
    for _ in range(2):
        step_of(model, run)()
    assert peak(model, run) <= least
    assert re.search(r"kept by \S*norm to \S*down \d", str(refused.value))


def test_a_first_step_above_the_budget_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, run = made("blocks", rematc.backend(700_000, inner="eager"))
    with caplog.at_level(logging.WARNING, "rematc"):
        step_of(model, run)()
    assert "one step runs several graphs, and this first one needs" in caplog.text


def test_one_graph_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_compiles(monkeypatch)
    model = Model()
    run = torch.compile(model, backend=rematc.backend(1_500_000, inner="eager"))
    for _ in range(4):
        step_of(model, run)()
    assert len(seen) == 1


def test_what_fits_as_it_is_is_not_compiled_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_compiles(monkeypatch)
    model, run = made("blocks", rematc.backend(1_500_000, inner="eager"))
    for _ in range(2):
        step_of(model, run)()
    compiled = len(seen)
    assert 2 < compiled <= 4  # two graphs, first alone, then with their shares where those are others
    for _ in range(3):
        step_of(model, run)()
    assert len(seen) == compiled


def test_a_step_that_took_too_much_before_it_was_known_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, run = made("blocks", rematc.backend(1_200_000, inner="eager"))
    step_of(model, run)()
    with caplog.at_level(logging.WARNING, "rematc"):
        step_of(model, run)()
    assert "above the budget: they share it from now on" in caplog.text


# Code that needs more than was foreseen


class Pretended:
    """Compiles nothing: a chain of layers whose code needs more than the graph says, by the plan."""

    def __init__(
        self, layers: int, budget: int, more: Callable[[Plan], int], first: Callable[[Problem], Plan]
    ) -> None:
        self.problem, self.more, self.first = chain(layers).with_budget(budget), more, first
        self.plans: list[Plan] = []

    def __call__(self, inputs: Any, given: Given) -> Made:
        resident = given.others_bytes if given.resident_bytes is None else given.resident_bytes
        held, meanwhile = given.outside
        problem = replace(self.problem, resident_bytes=resident + held, meanwhile_bytes=meanwhile)
        plan = given.plan or self.first(problem)
        problem = replace(problem, lowering_bytes=self.more(plan))
        plan = judged(problem, plan)
        self.record(problem, plan, given.outside)
        return Made(one_node, problem, plan, outside=given.outside, code=self.code)

    def code(self, plan: Plan) -> Footprint:
        use = use_of(self.problem, plan)
        return Footprint(judged(self.problem, plan).peak_bytes + self.more(plan), 0, use.kept_bytes)

    def record(self, problem: Problem, plan: Plan, outside: Outside) -> None:
        self.plans.append(plan)


def pretended_steps(
    budget: int, more: Callable[[Plan], int], steps: int = 6, first: Callable[[Problem], Plan] = save_all
) -> list[Pretended]:
    shared = Threads(Options(budget))
    graphs = [Pretended(16, budget, more, first) for _ in range(2)]
    runs = [shared.graph(graph, []) for graph in graphs]
    for _ in range(steps):
        x = torch.ones((), requires_grad=True)
        for run in runs:
            x = run(x)
        x.backward()
    return graphs


@pytest.mark.parametrize("more", [0, 2, 5, 10])
@pytest.mark.parametrize("budget", [22, 24, 28])
def test_plans_are_chosen_anew_by_what_their_code_is_found_to_need(budget: int, more: int) -> None:
    graphs = pretended_steps(budget, lambda plan: more if plan.cost_ns else 0)
    assert max(graph.plans[-1].peak_bytes for graph in graphs) <= budget
    assert any(graph.plans[-1].cost_ns for graph in graphs)


def test_plans_whose_code_fits_are_compiled_once() -> None:
    graphs = pretended_steps(28, lambda plan: 3 if plan.cost_ns else 0)
    kinds = [[next(group) for _, group in groupby(plan.saved for plan in graph.plans)] for graph in graphs]
    assert max(map(len, kinds)) == 2  # alone, and with its share


def test_code_that_never_fits_is_refused() -> None:
    with pytest.raises(rematc.BudgetError, match="2 calls of 2 graphs"):
        pretended_steps(30, lambda plan: 100 if plan.cost_ns else 0)


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_the_smallest_budget_named_is_kept_by_the_code(seed: int) -> None:
    """Code differs from plan to plan, and what a graph ran by before the budget was known does not count."""

    def more(plan: Plan) -> int:
        return (len(plan.saved) * 7 + plan.peak_bytes * 3 + seed * 5) % 9 - 2

    with pytest.raises(rematc.BudgetError) as refused:
        pretended_steps(7, more)
    least = refused.value.minimum_bytes
    graphs = pretended_steps(least, more)
    assert max(graph.plans[-1].peak_bytes for graph in graphs) <= least


def test_plans_for_each_alone_give_way_to_cheaper_ones_for_both() -> None:
    graphs = pretended_steps(200, lambda _: 0, first=recompute_all)
    assert [graph.plans[0].cost_ns > 0 for graph in graphs] == [True, True]
    assert [graph.plans[-1].cost_ns for graph in graphs] == [0, 0]
