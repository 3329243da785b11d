"""Several graphs, one budget: the choice of plans against trying every one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from rematc.baselines import recompute_all, save_all
from rematc.choose import choices
from rematc.options import SolveOptions
from rematc.problem import Problem
from rematc.share import Turn, Use, beside, needed, share, smallest, turns, use_of
from rematc.simulate import validate
from tests.graphs import chain, problems

sizes = st.integers(0, 30)


@dataclass(frozen=True)
class Step:
    """Graphs that run forward, the calls in the order in which they go back, and what is less meanwhile."""

    forward: list[int]
    backward: list[int]
    less: int
    twice: list[int]

    @property
    def turns(self) -> list[Turn]:
        return turns(self.forward, [self.forward[c] for c in self.backward], self.less, self.twice)


@st.composite
def uses_of(draw: st.DrawFn) -> Use:
    """What runs forward is part of the peak."""
    peak = draw(sizes)
    kept, left, forward = draw(sizes), draw(sizes), draw(st.integers(0, peak))
    return Use(draw(st.integers(0, 9)), peak, kept, left, forward)


@st.composite
def several(draw: st.DrawFn) -> tuple[list[Step], list[list[Use]]]:
    """Two kinds of steps of some calls of up to three graphs, each with up to four plans to choose from."""
    uses = draw(st.lists(st.lists(uses_of(), min_size=1, max_size=4), min_size=1, max_size=3))
    calls = st.lists(st.integers(0, len(uses) - 1), max_size=6)
    steps = []
    for forward in ([*range(len(uses)), *draw(calls)], draw(calls)):
        opposite = list(reversed(range(len(forward))))
        backward = opposite if draw(st.booleans()) else draw(st.permutations(opposite))
        least = [min(use.left_bytes for use in uses[g]) for g in forward]
        before = [sum(least[c] for c in backward[:t]) for t in range(len(backward))]
        twice = [draw(st.integers(0, min(3, most))) for most in before]
        steps.append(Step(forward, backward, draw(st.integers(0, 3)), twice))
    return steps, uses


def alive(steps: Sequence[Step], picked: Sequence[Use]) -> int:
    """The most that is alive in a step, pass by pass."""
    needs = []
    for step in steps:
        waiting = list[int]()  # calls that ran forward and have not gone back
        for call, graph in enumerate(step.forward):
            others = sum(picked[step.forward[c]].kept_bytes for c in waiting)
            needs.append(others + picked[graph].forward_bytes - step.less)
            waiting.append(call)
        left = 0
        for call, twice in zip(step.backward, step.twice, strict=True):
            waiting.remove(call)
            use = picked[step.forward[call]]
            others = sum(picked[step.forward[c]].kept_bytes for c in waiting)
            needs.append(others + use.peak_bytes + left - step.less - twice)
            left += use.left_bytes
    return max(needs)


def turns_of(steps: Sequence[Step]) -> list[list[Turn]]:
    return [step.turns for step in steps]


def every_choice(uses: Sequence[Sequence[Use]]) -> Iterator[tuple[int, ...]]:
    return product(*(range(len(options)) for options in uses))


def picked(uses: Sequence[Sequence[Use]], choice: Sequence[int]) -> list[Use]:
    return [options[o] for options, o in zip(uses, choice, strict=True)]


@settings(max_examples=60)
@given(several(), st.integers(0, 200))
def test_the_choice_is_the_cheapest_that_fits(case: tuple[list[Step], list[list[Use]]], budget: int) -> None:
    steps, uses = case
    fitting = [c for c in every_choice(uses) if alive(steps, picked(uses, c)) <= budget]

    def cost(choice: Sequence[int]) -> int:
        return sum(uses[g][choice[g]].cost_ns for step in steps for g in step.forward)

    found = share(turns_of(steps), uses, budget)
    if found is None:
        assert not fitting
    else:
        assert found in fitting
        assert cost(found) == min(map(cost, fitting))


@settings(max_examples=40)
@given(several())
def test_the_smallest_budget_is_one_that_has_a_choice(case: tuple[list[Step], list[list[Use]]]) -> None:
    steps, uses = case
    calls = turns_of(steps)
    least = needed(calls, picked(uses, smallest(calls, uses)))
    assert least == min(alive(steps, picked(uses, c)) for c in every_choice(uses))
    assert share(calls, uses, least) is not None
    assert least <= 0 or share(calls, uses, least - 1) is None


def test_a_byte_is_a_byte_however_large_the_budget() -> None:
    least = 10**12
    uses = [[Use(0, least + 1, 0, 0), Use(0, least + 100, 0, 0), Use(5, least, 0, 0)]]
    assert share([turns([0], [0])], uses, least) == (2,)
    assert share([turns([0], [0])], uses, least - 1) is None


@settings(max_examples=40)
@given(several())
def test_what_is_needed_is_what_the_worst_pass_meets(case: tuple[list[Step], list[list[Use]]]) -> None:
    steps, uses = case
    first, calls = [options[0] for options in uses], turns_of(steps)
    assert needed(calls, first) == alive(steps, first)
    each = {g: first[g].peak_bytes + beside(calls, first, g) for step in steps for g in step.forward}
    assert max(each.values()) == alive(steps, first)


# Plans to choose from


@settings(max_examples=40)
@given(problems())
def test_every_plan_is_one_for_the_problem_and_says_what_it_keeps(problem: Problem) -> None:
    problem = problem.with_budget(None)
    plans = choices(problem, SolveOptions())
    for plan in plans:
        validate(problem, plan)
    cheapest = min(plan.cost_ns for plan in plans)
    assert plans[0].cost_ns == cheapest
    assert len({plan.saved for plan in plans}) == len(plans)


def test_plans_of_a_chain_keep_anything_from_all_to_nothing_but_what_is_returned() -> None:
    problem = chain(12)
    plans = choices(problem, SolveOptions())
    kept = {use_of(problem, plan).kept_bytes for plan in plans}
    returned = use_of(problem, recompute_all(problem)).kept_bytes
    assert min(kept) == returned
    assert max(kept) == use_of(problem, save_all(problem)).kept_bytes
    assert len(kept) > 3


def test_use_counts_each_storage_once_and_nothing_that_is_resident() -> None:
    problem = chain(4)
    plan = save_all(problem)
    found, graph = use_of(problem, plan), problem.graph
    kept = {graph.values[v].storage for v in (*plan.saved, *graph.outputs)} - graph.resident
    assert found.kept_bytes == sum(graph.storage_bytes[s] for s in kept)
    assert found.peak_bytes == plan.peak_bytes - problem.resident_bytes
    left = {graph.values[v].storage for v in (*graph.gradients, *graph.outputs)}  # results are small here
    assert found.left_bytes == sum(graph.storage_bytes[s] for s in left)


def test_what_is_returned_or_a_gradient_and_resident_all_the_same_takes_nothing() -> None:
    """A model that returns its input."""
    problem = chain(4)
    graph = replace(problem.graph, outputs=problem.graph.inputs, gradients=problem.graph.inputs)
    size = [9 if n == graph.values[graph.inputs[0]].storage else b for n, b in enumerate(graph.storage_bytes)]
    problem = replace(problem, graph=replace(graph, storage_bytes=tuple(size)))
    found = use_of(problem, recompute_all(problem))
    assert (found.kept_bytes, found.left_bytes) == (0, 0)
