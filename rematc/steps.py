"""What runs in one step: the first shows which graphs there are, from the second on they share the budget.

Dynamo compiles a model of several graphs (graph breaks, blocks compiled one by one) one after the other, and
runs each before it finds the next. So the first graph is planned as if it were alone, and each later one with
what those before it keep; what that needs above the budget is said. When the next step begins all graphs are
known: each gets a plan by `rematc.share`, and is compiled once more where that is another one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rematc import compat
from rematc.choose import choices
from rematc.errors import BudgetError
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.resident import gradient_bytes
from rematc.share import Use, beside, needed, share, smallest, use_of
from rematc.storages import storages, tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """A graph that was compiled. One without a backward pass has neither problem nor plan.

    ``beside_bytes`` are kept free for what is not there yet: a reserve, the state of an optimizer.
    ``accumulated_bytes``: gradients of earlier steps that it counted as resident.
    """

    run: Callable[..., Any]
    problem: Problem | None = None
    plan: Plan | None = None
    beside_bytes: int = 0
    accumulated_bytes: int = 0


@dataclass(frozen=True)
class Given:
    """How a graph is to be compiled where it is not alone.

    ``others_bytes``: kept by other graphs, in the first step. ``resident_bytes``: all that is there beside
    the graph while it runs, once that is known. ``plan`` is taken as it is, ``budget_bytes`` in place of the
    budget.
    """

    others_bytes: int = 0
    resident_bytes: int | None = None
    plan: Plan | None = None
    budget_bytes: int | None = None


ALONE = Given()


class Compile(Protocol):
    """Compiles a graph from its inputs, as often as it is asked to, and passes on what was planned."""

    def __call__(self, inputs: Any, given: Given) -> Made:
        """Compile it as ``given``."""

    def record(self, problem: Problem, plan: Plan) -> None:
        """This is its plan from now on."""


class GraphOfStep:
    """A graph as Dynamo calls it."""

    def __init__(self, steps: Steps, compile: Compile, inputs: Any) -> None:
        self.steps, self.compile = steps, compile
        self.options: tuple[Plan, ...] = ()  # to choose from, until one is chosen
        self.made = steps.first(self, inputs)

    def __call__(self, *args: Any) -> Any:
        """Run forward."""
        if self.made.plan is None or compat.is_in_backward():  # a checkpoint runs it again: as it was
            return self.made.run(*args)
        self.steps.begin(self, args)
        results = self.made.run(*args)
        self.steps.ran(self, args, results)
        return results

    def counted(self, resident_bytes: int) -> None:
        """It stays as it is; its peak is that of the step, with all that is there beside it."""
        problem, plan = self.made.problem, self.made.plan
        assert problem is not None and plan is not None
        more = resident_bytes - problem.resident_bytes
        problem = replace(problem, resident_bytes=resident_bytes)
        plan = replace(plan, peak_bytes=plan.peak_bytes + more, digest=problem.digest)
        self.made = replace(self.made, problem=problem, plan=plan)
        self.compile.record(problem, plan)

    @property
    def uses(self) -> list[Use]:
        """Of the plans to choose from, or of the one that it has."""
        assert self.made.problem is not None and self.made.plan is not None
        return [use_of(self.made.problem, plan) for plan in self.options or (self.made.plan,)]


@dataclass
class _Call:
    """One forward pass: the storages of its inputs and results, and whether its backward pass is to come."""

    graph: GraphOfStep
    inputs: dict[int, int]
    results: dict[int, int]
    leaves: Sequence[Callable[[], Any]]
    nodes: list[Callable[[], Any]] = field(default_factory=list)
    is_through: bool = False

    @property
    def is_open(self) -> bool:
        """Is what it keeps still there? Not once backward has begun, or nobody can ask for that any more."""
        return not self.is_through and any(node() is not None for node in self.nodes)


class Steps:
    """The calls of the step that runs, and the kinds of steps that there were, of graphs that share."""

    def __init__(self, solve: SolveOptions, accumulate: bool | None = None) -> None:
        self.solve, self.accumulate = solve, accumulate
        self.budget_bytes: int | None = None
        self.calls: list[_Call] = []
        # The calls of the last step of each kind: of each sequence of several graphs.
        self.kinds: dict[tuple[int, ...], list[_Call]] = {}
        self.carried: list[_Call] = []  # of earlier steps, never differentiated, and still there
        self.planned: set[tuple[frozenset[tuple[int, ...]], bool]] = (
            set()
        )  # which kinds, and whether with gradients there

    def first(self, graph: GraphOfStep, inputs: Any) -> Made:
        """Compile a graph that was just found, with what the running step keeps by now."""
        open_calls = [call for call in (*self.carried, *self.calls) if call.is_open]
        others = sum(call.graph.uses[0].kept_bytes for call in open_calls)
        try:
            made = graph.compile(inputs, Given(others))
            if made.problem is not None:
                self.budget_bytes = made.problem.budget_bytes
            return made
        except BudgetError as e:
            if not others:
                raise
            self.budget_bytes = e.budget_bytes
            log.warning(
                "one step runs several graphs, and this first one needs %.2f MB, which is above the budget: "
                "from the next step on they share it",
                e.minimum_bytes / 1e6,
            )
            return graph.compile(inputs, Given(others, budget_bytes=e.minimum_bytes))

    def begin(self, graph: GraphOfStep, args: tuple[Any, ...]) -> None:
        """A graph is about to run forward; if all before it are through, a step begins."""
        if self._is_over():
            last = [call for call in self.calls if call.is_through]
            self._carry()
            if len(last) > 1:
                self.kinds[tuple(id(call.graph) for call in last)] = last
            gradients = gradient_bytes(args, self.accumulate)
            if any(kind[0].graph is graph for kind in self.kinds.values()):
                self._find_options(gradients > 0)
            elif gradients > graph.made.accumulated_bytes:
                log.info("gradients accumulate: %.2f MB of them are resident from now on", gradients / 1e6)
                graph.made = graph.compile(list(args), ALONE)
        if graph.options:
            self._choose(graph, list(args))

    def _is_over(self) -> bool:
        """Is the step over? Then some of its calls went through, or nothing of it is there any more."""
        return any(call.is_through for call in self.calls) or not any(call.is_open for call in self.calls)

    def _carry(self) -> None:
        """Begin a step, with what earlier ones still keep: results that somebody holds."""
        known = len(self.carried)
        self.carried = [call for call in (*self.carried, *self.calls) if call.is_open]
        self.calls = []
        if len(self.carried) > known:
            kept = sum(call.graph.uses[0].kept_bytes for call in self.carried)
            text = "results of earlier forward passes are held, with %.2f MB kept for their backward passes"
            log.warning(text, kept / 1e6)

    def ran(self, graph: GraphOfStep, args: tuple[Any, ...], results: Any) -> None:
        """It ran forward: what it keeps is there until its backward pass begins."""
        made = {key for call in self.calls for key in call.results}
        inputs = {key: size for key, size in storages(args) if key not in made}
        leaves = [weakref.ref(t) for t in tensors(args) if t.is_leaf and t.requires_grad]
        call = _Call(graph, inputs, dict(storages(results)), leaves)
        for node in {t.grad_fn for t in tensors(results) if t.grad_fn is not None}:
            call.nodes.append(weakref.ref(node))
            node.register_prehook(lambda _: setattr(call, "is_through", True))
        self.calls.append(call)

    def _find_options(self, accumulating: bool) -> None:
        """Plans to choose from, for each graph, where there are kinds of steps that were not planned for."""
        alive = {key: kind for key, kind in self.kinds.items() if any(map(_is_alive, kind))}
        if len(alive) < len(self.kinds):  # of a model that is gone
            self.kinds = alive
            self.planned.clear()
        known = frozenset(self.kinds)
        if self.budget_bytes is None or self.planned & {(known, accumulating), (known, True)}:
            return
        self.planned.add((known, accumulating))
        used = self.resident_bytes() + needed(self._steps, [g.uses[0] for g in self._graphs])
        if used > self.budget_bytes:
            text = "steps of several graphs took up to %.2f MB, above the budget: now they share it"
            log.warning(text, used / 1e6)
        elif not any(graph.uses[0].cost_ns for graph in self._graphs):  # all fits, and nothing costs less
            resident, uses = self.resident_bytes(), [g.uses[0] for g in self._graphs]
            for n, graph in enumerate(self._graphs):
                graph.counted(resident + beside(self._steps, uses, n))
            return
        for graph in self._graphs:
            problem, plan = graph.made.problem, graph.made.plan
            if problem is not None and plan is not None:
                graph.options = (plan, *choices(problem, self.solve))

    def _choose(self, graph: GraphOfStep, args: list[Any]) -> None:
        """Compile ``graph`` anew with its share of the budget. Those chosen before it have their plans."""
        graphs, steps = self._graphs, self._steps
        assert self.budget_bytes is not None
        uses, resident = [g.uses for g in graphs], self.resident_bytes()
        choice = share(steps, uses, self.budget_bytes - resident)
        if choice is None:
            kept = [(f"kept by graph {n}", min(use.kept_bytes for use in u)) for n, u in enumerate(uses)]
            raise BudgetError(
                self.budget_bytes,
                resident + smallest(steps, uses),
                step=f"{max(map(len, steps))} graphs in one step",
                largest=tuple(sorted(kept, key=lambda k: -k[1])[:3]),
                resident_bytes=resident,
            )
        mine, picked = graphs.index(graph), [u[o] for u, o in zip(uses, choice, strict=True)]
        plan, graph.options = graph.options[choice[mine]], ()
        total = resident + beside(steps, picked, mine)
        if plan is graph.made.plan:
            graph.counted(total)
        else:
            graph.made = graph.compile(args, Given(0, total, plan))

    @property
    def _steps(self) -> list[list[int]]:
        """The kinds of steps, each as its graphs by number."""
        graphs = self._graphs
        return [[graphs.index(call.graph) for call in kind] for kind in self.kinds.values()]

    @property
    def _graphs(self) -> list[GraphOfStep]:
        """Those that run in steps of several, each once, in order."""
        return list(dict.fromkeys(call.graph for kind in self.kinds.values() for call in kind))

    def resident_bytes(self) -> int:
        """What is there before a step of several graphs: all that they read and none makes, and gradients."""
        beside = max(graph.made.beside_bytes for graph in self._graphs)
        kept = sum(call.graph.uses[0].kept_bytes for call in self.carried if call.is_open)
        return beside + kept + max(map(self._resident_in, self.kinds.values()))

    def _resident_in(self, kind: list[_Call]) -> int:
        inputs: dict[int, int] = {}
        for call in kind:
            inputs |= call.inputs
        leaves = [leaf() for call in kind for leaf in call.leaves]
        return sum(inputs.values()) + gradient_bytes(leaves, self.accumulate)


def _is_alive(call: _Call) -> bool:
    """Is any parameter of its model still there?"""
    return not call.leaves or any(leaf() is not None for leaf in call.leaves)
