"""A model, and what a few steps of it leave behind: under its smallest budget, and without rematc."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rematc
from rematc.graph import Graph
from rematc.measure import measure
from rematc.options import Inner

WIDTH, ROWS = 32, 128
SEVERAL = 4  # steps: what is outside of several graphs is known after the third
PATIENCE_S = 5.0  # a plan is proven in a tenth of that; where the clock cuts, another op is recomputed
Results = tuple[Tensor, ...]


def called(run: Callable[..., Any], inputs: Results) -> Results:
    """The loss and what else the model returns."""
    results = run(*inputs)
    return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True)
class Case:
    """A model that returns its loss, or that and more, and an op: recomputed, or between ops that are."""

    make: Callable[[], nn.Module]
    op: str
    inputs: Callable[[], Results] = lambda: (torch.randn(ROWS, WIDTH),)
    step: Callable[[Callable[..., Any], Results], Results] = called
    steps: int = 2
    handed_bytes: int = 0  # that a step makes for the model: to a plan they are resident
    train: Callable[[Trained], Results] | None = None  # a step, if it is not a loss and its backward pass


class Trained:
    """A model of a case after some steps, and what it was after each."""

    def __init__(self, case: Case, backend: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(1)
        self.case, self.model, self.inputs = case, case.make(), case.inputs()
        self.run = torch.compile(self.model, backend=backend)
        self.states = [self._state(self.step()) for _ in range(case.steps)]

    def step(self) -> list[Tensor]:
        if self.case.train is not None:
            return [t.detach() for t in self.case.train(self)]
        loss, *results = self.case.step(self.run, self.inputs)
        loss.backward()
        return [loss.detach(), *(t.detach() for t in results)]

    def clear(self) -> None:
        for leaf in (*self.model.parameters(), *self.inputs):
            leaf.grad = None

    def _state(self, results: list[Tensor]) -> list[Tensor]:
        leaves = (*self.model.parameters(), *self.inputs)
        there = [*results, *(t.detach() for t in leaves), *self.model.buffers()]
        there += [torch.empty(0) if leaf.grad is None else leaf.grad for leaf in leaves]
        generators = [torch.default_generator, *getattr(self.model, "generators", ())]
        self.clear()
        return [t.clone() for t in there] + [g.get_state() for g in generators]

    def peak_bytes(self) -> int:
        """Measured, of one more step."""

        def step() -> None:
            self.step()
            self.clear()

        return measure(step, warmup=1).peak_bytes - self.case.handed_bytes


def under_the_smallest_budget(case: Case, inner: Inner = "eager") -> tuple[Trained, rematc.Backend]:
    """Also what is outside of the graphs, which later steps show, has room there."""
    budget = 1
    for _ in range(10):
        backend = rematc.backend(budget, inner=inner, costs="roofline", time_limit_s=PATIENCE_S)
        try:
            return Trained(case, backend), backend
        except rematc.BudgetError as e:
            budget = e.minimum_bytes
    raise AssertionError("each budget that a refusal names is refused in turn")


def assert_as_without(case: Case, inner: Inner = "eager") -> None:
    """Under the smallest budget: results, gradients, state, generators, and the peak.

    Under Inductor nobody says which op it is that is recomputed, and the numbers are equal within rounding.
    """
    ours, backend = under_the_smallest_budget(case, inner)
    measured = backend.resident_bytes + ours.peak_bytes()  # while it is compiled
    if inner == "eager":
        assert_same_bits(case, ours, backend)
    else:
        assert_as_inductor_alone(case, ours)
    predicted = max(plan.peak_bytes for plan in backend.plans)
    assert measured <= predicted <= backend.options.budget


def assert_as_inductor_alone(case: Case, ours: Trained) -> None:
    """Of what Inductor alone computes; state that is counted, and generators, to the bit."""
    theirs = Trained(case, "inductor")
    for mine, other in zip(ours.states, theirs.states, strict=True):
        for a, b in zip(mine, other, strict=True):
            largest = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() and b.is_floating_point() else 0.0
            rtol, atol = (1e-4, 1e-4 * largest + 1e-6) if largest else (0.0, 0.0)
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def assert_same_bits(case: Case, ours: Trained, backend: rematc.Backend) -> None:
    """The same without the peak."""
    theirs = Trained(case, "aot_eager")
    for step, (mine, other) in enumerate(zip(ours.states, theirs.states, strict=True)):
        pairs = enumerate(zip(mine, other, strict=True))
        wrong = [n for n, (a, b) in pairs if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)]
        assert not wrong, f"in step {step}"
    assert any(
        is_among_recomputed(problem.graph, plan.backward, case.op)
        for problem, plan in zip(backend.problems, backend.plans, strict=True)
    )


def is_among_recomputed(graph: Graph, steps: tuple[int, ...], op: str) -> bool:
    """Is there such an op that is recomputed, or with one after it that is, and one before it, if any is?"""
    again = {i for i in steps if graph.ops[i].phase == "forward" and i not in graph.views}
    for i in (i for i in graph.forward if op in graph.ops[i].target):
        before = {j for j in graph.forward if i in after_op(graph, j)}
        if i in again or (again & after_op(graph, i) and (not before or again & before)):
            return True
    return False


def after_op(graph: Graph, first: int) -> set[int]:
    """The forward ops that depend on one."""
    values, found = {*graph.ops[first].outputs}, set[int]()
    for i in graph.forward:
        if not values.isdisjoint(graph.ops[i].inputs):
            found.add(i)
            values.update(graph.ops[i].outputs)
    return found
