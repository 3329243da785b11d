"""What runs in one step: the first shows which graphs there are, from the second on they share the budget.

Dynamo compiles a model of several graphs (graph breaks, blocks compiled one by one) one after the other, and
runs each before it finds the next. So the first graph is planned as if it were alone, and each later one with
what those before it keep; what that needs above the budget is said. When the next step begins all graphs are
known: each gets a plan by `rematc.share`, and is compiled once more where that is another one.

What lies outside of all graphs is found by `rematc.survey` in the first steps, and then counted with each.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rematc import compat
from rematc.arguments import Arguments
from rematc.calls import Call
from rematc.compiled import Compile, Compiled, Given, Made, picked, settled
from rematc.errors import BudgetError, format_bytes
from rematc.kinds import Key, Kind, kept_beside
from rematc.ledger import Ledger
from rematc.optimizer import STEP, Needs, local, optimizer_needs, said_of_step
from rematc.options import Options
from rematc.regather import advice
from rematc.resident import bytes_beside_new, gradient_bytes
from rematc.rounding import given_bytes
from rematc.share import Turn, beside, needed, share, smallest, turns
from rematc.storages import storages
from rematc.surveys import Surveys
from rematc.watch import Gpu

log = logging.getLogger(__name__)

OUTSIDE = (
    "this step takes %s, above the budget of %s: up to %s are taken outside of the compiled graph, as by a "
    "loss. That is planned for from the next step on; if the loss is compiled with the model, it takes less"
)

LEFT = (
    "%s of results of the last step are still there when the next one begins, and are planned for: less is "
    "recomputed if they are deleted before, or if the step is a function that does not return them"
)

EAGER = (
    "what a step trains before its first compiled graph runs eagerly, and on a CPU what that keeps is not "
    "counted: compile it too, or leave a reserve. Torch runs all of an nn.Sequential eagerly where one of "
    "its modules breaks the graph (TORCH_LOGS=graph_breaks tells which)"
)

RETRACED = (
    "compiled autograd traces the backward pass again and compiles it by itself, so that it does not run as "
    f"planned, and may take more than the budget: leave {compat.RETRACING} off"
)


class Steps:
    """The graphs that share a budget, and the steps that they ran in, of which ``thread`` ran the last."""

    def __init__(self, options: Options, say_once: Callable[..., None]) -> None:
        self.options = options
        self.say_once = say_once
        self.thread: weakref.ref[threading.Thread] | None = None
        self.running = 0  # calls by it
        self.budget_bytes = 0  # known once a graph was compiled
        self.calls: Ledger[Compiled] = Ledger()
        self.planned: set[Key[Compiled]] = set()  # the kinds of steps that plans were chosen for,
        self.planned_bytes = 0  # and what was resident to them
        self.trained: list[tuple[int, int]] = []  # which parameters,
        self.needs = Needs()  # and the optimizer's for those
        self.gpu = Gpu()
        self.said_bytes = 0  # held by results of earlier steps, as the last warning said
        self.surveys = Surveys(self._count_outside)

    def graph(self, compile: Compile, inputs: Any) -> Compiled:
        """Compile a graph that was found while a step runs."""
        self.surveys.pause()
        return Compiled(compile, self._first(compile, inputs))

    def run(self, graph: Compiled, args: tuple[Any, ...]) -> Any:
        """Run it forward, by a plan that fits into the step."""
        self.surveys.pause()
        given = Arguments(args, graph.known)
        if not self._goes_on(graph, given):
            self._begin(graph, given)
        watch = self.gpu.watch(graph, given)
        results = graph.made.run(*args)
        gradients = graph.gradients_of(given)
        call = self.calls.ran(graph, given, results, graph.made.use.kept_bytes, gradients)
        if watch:
            watch.follow(call)
        self.surveys.follow(call)
        return results

    def _first(self, compile: Compile, inputs: Any) -> Made:
        """A graph that was just found is compiled with what the running step keeps by now."""
        others = kept_beside(dict(storages(inputs)), self.calls.open)
        self.calls.compiled()
        try:
            made = compile(inputs, Given(others))
        except BudgetError as e:
            if not others:
                raise
            log.warning(
                "one step runs several graphs, and this first one needs %s, which is above the budget: "
                "from the next step on they share it",
                format_bytes(e.minimum_bytes),
            )
            self.budget_bytes = e.budget_bytes
            return compile(inputs, Given(others, budget_bytes=e.minimum_bytes))
        if made.problem is not None:
            self.budget_bytes = made.problem.budget_bytes or 0
        return made

    def _goes_on(self, graph: Compiled, args: Arguments) -> bool:
        """Does a step begin like the last one, so that `_begin` would take longer and find nothing new?"""
        return (
            args.is_plain
            and graph.is_settled
            and self.surveys.is_through(graph)
            and self.calls.repeats(graph)
            and bytes_beside_new(args.leaves, self.options.accumulate) <= graph.made.accumulated_bytes
        )

    def _begin(self, graph: Compiled, args: Arguments) -> None:
        """A graph is about to run forward; if all before it are through, a step begins."""
        if self.calls.begins():
            self.gpu.begin(args)
            if args.are_from_eager_code:
                self.say_once(EAGER)
            if self.calls.is_retraced:
                self.say_once(RETRACED)
            self.surveys.begin(graph, args)
            read = args.storages if self.calls.held or self.calls.left else {}  # takes time
            held, left = kept_beside(read, self.calls.held), self.calls.left_bytes(read)
            self._say_what_is_held(held)
            self.planned &= self.calls.kinds.keys()
            self.calls.count_beside(graph)
            if graph in self.calls.graphs:
                self._look_around(graph, args, left)
                self._plan_together(left)
            else:
                self._plan_alone(graph, args, held, left)
                self.gpu.miss(graph.beside_bytes - self.options.reserve_bytes)
        if not graph.is_chosen and graph in self.calls.graphs:
            self._choose(graph, args.values)

    def _say_what_is_held(self, held: int) -> None:
        if held > 2 * self.said_bytes:  # one that grows, or comes again, is not said at each step
            text = "results of earlier forward passes are held, with %s kept for their backward passes"
            log.warning(text, format_bytes(held))
            self.said_bytes = held

    def _plan_alone(self, graph: Compiled, args: Arguments, held: int, left: int) -> None:
        """Is there more beside a graph, alone in its step, than it was planned for?"""
        made = graph.made
        if self.calls.left_stays:  # resident like what is held
            held, passing = held + left, 0
        else:
            passing = max(graph.passing_bytes, left - max(0, made.others_bytes - held))
        gradients = max(made.accumulated_bytes, bytes_beside_new(args.leaves, self.options.accumulate))
        held = max(made.others_bytes, held)
        more = gradients - made.accumulated_bytes + held - made.others_bytes
        more = max(more, self.gpu.unknown_bytes(args, graph.beside_bytes + left, self.options.accumulate))
        if not more and passing == graph.passing_bytes and graph.outside == made.outside:
            return
        text = "%s more are resident from now on: gradients that accumulate, results that are held, a loss"
        log.info(text, format_bytes(more + graph.outside.held_bytes - made.outside.held_bytes))
        graph.passing_bytes = passing
        if graph.beside_bytes + more + graph.use.peak_bytes <= self.budget_bytes:
            graph.count(graph.beside_bytes + more)
            graph.made = replace(graph.made, accumulated_bytes=gradients, others_bytes=held)
        else:
            if left:
                log.warning(LEFT, format_bytes(left))
            graph.passing_bytes = 0
            self.calls.compiled()
            graph.made = graph.compile(list(args.values), Given(held + passing, outside=graph.outside))

    def _count_outside(self, graph: Compiled) -> None:
        """The same once it is known what is outside, in the step that showed it."""
        needed = graph.beside_bytes + graph.use.peak_bytes
        if needed <= self.budget_bytes:
            graph.count(graph.beside_bytes)
        else:
            log.warning(OUTSIDE, *map(format_bytes, (needed, self.budget_bytes, sum(graph.outside))))

    def _plan_together(self, left: int) -> None:
        """Leave all plans open, if the kinds of steps, or what is beside them, are not those planned for."""
        kinds, resident, graphs = set(self.calls.kinds), self.resident_bytes(), self.calls.graphs
        is_new, more_is_left = not kinds <= self.planned, self._more_is_left(left)
        is_known = all(graph.outside == graph.made.outside for graph in graphs) and not more_is_left
        if not is_new and resident <= self.planned_bytes and is_known:
            return
        self.planned, self.planned_bytes = kinds, resident
        used = self._count()
        if used > self.budget_bytes:
            text = "the graphs of one step need %s, above the budget: they share it from now on"
            log.warning(text, format_bytes(used))
        elif not (is_new and any(graph.plan.cost_ns for graph in graphs)):  # nothing can cost less
            return
        for graph in graphs:
            graph.leave_open(self.options.solve)

    def _look_around(self, graph: Compiled, args: Arguments, left: int) -> None:
        """What is on a GPU, beside what steps that begin with ``graph`` are known to find there?"""
        if self.gpu.there_bytes is None:
            return
        begun = [kind for kind in self.calls.kinds.values() if kind.first_graph is graph]
        kept_free = self._kept_free()
        for kind in begun:
            known = sum(kind.read.values()) + kind.beside_bytes + kept_free + left
            kind.unknown_bytes = self.gpu.unknown_bytes(args, known, self.options.accumulate)
        planned = max(map(self._resident_in, begun or self.calls.kinds.values())) + self.needs.to_come_bytes
        self.gpu.miss(planned)

    def _more_is_left(self, left: int) -> bool:
        """Are there more results of calls that went back than was known: ``left`` now, or in each step?"""
        more, passing = False, 0 if self.calls.left_stays else left
        for graph in self.calls.graphs:
            more |= passing > graph.passing_bytes
            graph.passing_bytes = 0 if self.calls.left_stays else max(graph.passing_bytes, passing)
        for call in self._recorded():
            more |= call.left_bytes > call.graph.results_left_bytes
            call.graph.results_left_bytes = max(call.graph.results_left_bytes, call.left_bytes)
        return more

    def _choose(self, graph: Compiled, args: tuple[Any, ...]) -> None:
        """Compile ``graph`` anew with its share of the budget. Those chosen before it have their plans."""
        graphs, steps, resident = self.calls.graphs, self._steps(), self.resident_bytes()

        def shared() -> Sequence[int] | None:
            return settled(graphs, lambda uses: share(steps, uses, self.budget_bytes - resident))

        choice = shared()
        if choice is None:  # as it is guessed: the code of the smallest plans may need less
            least_bytes = self._smallest()
            choice = shared()
            if choice is None:
                raise self._refusal(least_bytes)
        mine, uses = graphs.index(graph), picked(graphs, choice)
        self.calls.compiled()
        graph.choose(choice[mine], args, resident + beside(steps, uses, mine))
        if all(g.is_chosen for g in graphs) and self._count() > self.budget_bytes:
            raise self._refusal(self._smallest())

    def _count(self) -> int:
        """Each graph's peak is that of the step while it runs; returns the most that any step needs."""
        graphs, steps, resident = self.calls.graphs, self._steps(), self.resident_bytes()
        uses = [graph.use for graph in graphs]
        for n, graph in enumerate(graphs):
            graph.count(resident + beside(steps, uses, n))
        return resident + needed(steps, uses)

    def _smallest(self) -> int:
        """The smallest budget that is kept, whatever plans graphs run by now: all are left open."""
        graphs, steps = self.calls.graphs, self._steps()
        for graph in graphs:
            graph.leave_open(self.options.solve)
        choice = settled(graphs, lambda uses: [1 + o for o in smallest(steps, [u[1:] for u in uses])])
        return self.resident_bytes() + needed(steps, picked(graphs, choice or ()))

    def _steps(self) -> list[list[Turn]]:
        """The kinds of steps; to one that has less beside it than another, that much less is there."""
        numbers, resident = {g: n for n, g in enumerate(self.calls.graphs)}, self.resident_bytes()
        steps = []
        for kind in self.calls.kinds.values():
            forward, backward = ([numbers[c.graph] for c in calls] for calls in (kind.calls, kind.backward))
            less = resident - self._resident_in(kind) - self._kept_free()
            twice = [kind.twice_bytes(t) for t in range(len(backward))]
            steps.append(turns(forward, backward, less, twice, carried=kind.carried))
        return steps

    def _refusal(self, least_bytes: int) -> BudgetError:
        graphs = self.calls.graphs
        calls = max(len(kind.calls) for kind in self.calls.kinds.values())
        kept = [(f"kept by {g.name}", min(use.kept_bytes for use in g.uses)) for g in graphs]
        return BudgetError(
            self.budget_bytes,
            least_bytes,
            step=f"{calls} calls of {len(graphs)} graph{'s'[: len(graphs) - 1]} in one step",
            largest=tuple(sorted(kept, key=lambda k: -k[1])[:3]),
            resident_bytes=self.resident_bytes(),
            advice=next(filter(None, (advice(g.problem.graph) for g in graphs)), ""),
        )

    def resident_bytes(self) -> int:
        """What is there before a step of several graphs: all that they read and none makes, gradients, and
        what is kept free.
        """
        there = max(map(self._resident_in, self.calls.kinds.values()))
        return there + self._kept_free()

    def _kept_free(self) -> int:
        """For what rematc can't see, and for the optimizer's state of all that is trained: one graph may be
        called with many blocks' parameters.
        """
        leaves = {id(t): t for call in self._recorded() for leaf in call.leaves if (t := leaf()) is not None}
        which = [(key, t.numel()) for key, t in leaves.items()]
        if self.trained != which:
            self.trained, self.needs = which, optimizer_needs(self.options.optimizer, leaves.values())
            there = max(sum(kind.read.values()) for kind in self.calls.kinds.values())
            there += sum(given_bytes(local(p)) for p in leaves.values())  # and gradients
            self.say_once(said_of_step(there, self.needs, self.budget_bytes or None), STEP)
        return self.options.reserve_bytes + self.needs.to_come_bytes

    def _recorded(self) -> Iterator[Call[Compiled]]:
        """The calls of the last step of each kind."""
        return itertools.chain.from_iterable(kind.calls for kind in self.calls.kinds.values())

    def _resident_in(self, kind: Kind[Compiled]) -> int:
        leaves = [leaf() for call in kind.calls for leaf in call.leaves]
        # In turns, the gradients of a call that went back meet as many calls that are open as ever.
        gradients = gradient_bytes(leaves, kind.in_turns or self.options.accumulate)
        return sum(kind.read.values()) + gradients + kind.beside_bytes + kind.unknown_bytes
