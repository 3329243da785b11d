"""A graph that was compiled, and may be compiled again: for another plan, or with more beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from rematc import compat
from rematc.arguments import Arguments, Known
from rematc.cache import cache_folder
from rematc.choose import choices_once
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.ranks import decision
from rematc.share import Footprint, Use, use_of
from rematc.survey import Outside

NOTHING = Outside()


@dataclass(frozen=True)
class Made:
    """What compiling made of a graph. One without a backward pass has neither problem nor plan.

    Of what was counted as resident, ``accumulated_bytes`` are gradients of earlier steps, ``others_bytes`` is
    what other calls keep; ``outside`` was counted too. ``code`` says what that of a plan takes, resident not
    included; None where that is what the graph says.
    """

    run: Callable[..., Any]
    problem: Problem | None = None
    plan: Plan | None = None
    accumulated_bytes: int = 0
    others_bytes: int = 0
    outside: Outside = NOTHING
    code: Callable[[Plan], Footprint] | None = None

    @cached_property
    def use(self) -> Use:
        """What running it takes; asked in each step."""
        assert self.problem is not None and self.plan is not None
        use = use_of(self.problem, self.plan)
        if self.code is None:
            return use
        _, forward_bytes, kept_bytes = self.code(self.plan)
        return replace(use, forward_bytes=forward_bytes, kept_bytes=kept_bytes)


@dataclass(frozen=True)
class Given:
    """How a graph is to be compiled where it is not alone.

    ``others_bytes``: kept by other calls, where each graph is planned by itself. ``resident_bytes``: all that
    is there beside the graph while it runs, once that is known; ``outside`` comes on top of either. ``plan``
    is taken as it is, ``budget_bytes`` in place of the budget.
    """

    others_bytes: int = 0
    resident_bytes: int | None = None
    outside: Outside = NOTHING
    plan: Plan | None = None
    budget_bytes: int | None = None


ALONE = Given()


class Compile(Protocol):
    """Compiles a graph from its inputs, as often as it is asked to, and passes on what was planned."""

    def __call__(self, inputs: Any, given: Given) -> Made:
        """Compile it as ``given``."""

    def anew(self) -> Compile:
        """Another, for the same graph where it runs beside this one: its plans are its own."""

    def record(self, problem: Problem, plan: Plan, outside: Outside) -> None:
        """This is its plan from now on, and what is outside of it."""


@dataclass
class Option:
    """A plan to choose; until it ``is_lowered`` its use is a guess."""

    plan: Plan
    use: Use
    is_lowered: bool


class Compiled:
    """One graph; ``made`` is what runs. While not ``is_chosen``, another plan is to be chosen for it.

    ``outside``: what surveys of its steps found by now. ``surveys`` of steps that it begins were
    made, ``tries`` begun. ``results_left_bytes``: of its results, while calls before it go back.
    ``passing_bytes``: results of earlier steps that go when this one has new ones. ``known``: arguments that
    come again. It was watched in ``looks`` steps, the last of them ``looked_in``;
    ``ran`` is the code that ran last, ``ran_in`` the step in which that ran first.
    """

    def __init__(self, compile: Compile, made: Made) -> None:
        self.compile, self.made = compile, made
        self.outside, self.surveys, self.tries = made.outside, 0, 0
        self.results_left_bytes = self.passing_bytes = 0
        self.known = Known()
        self.looks = self.looked_in = self.ran_in = 0
        self.ran: Callable[..., Any] | None = None
        self.options: list[Option] = []  # once they were searched
        self.is_chosen = True

    @property
    def problem(self) -> Problem:
        """Of a graph with a backward pass."""
        assert self.made.problem is not None
        return self.made.problem

    @property
    def plan(self) -> Plan:
        """The one that it runs by."""
        assert self.made.plan is not None
        return self.made.plan

    @property
    def name(self) -> str:
        """By the modules that its forward pass goes through."""
        ops = self.problem.graph.ops
        modules = list(dict.fromkeys(ops[i].module for i in self.problem.graph.forward if ops[i].module))
        return f"{modules[0]} to {modules[-1]}" if modules else "a graph of no module"

    @property
    def use(self) -> Use:
        """Of the plan that it runs by."""
        return self._with_others(self.made.use)

    @property
    def is_settled(self) -> bool:
        """Is it planned with all that was found of its steps, and of results that stay?"""
        return self.is_chosen and not self.passing_bytes and self.outside == self.made.outside

    @property
    def uses(self) -> list[Use]:
        """Of the plan that it runs by, and of those to choose from."""
        options = [] if self.is_chosen else self.options
        return [self.use, *(self._with_others(option.use) for option in options)]

    def _with_others(self, use: Use) -> Use:
        """``use``, with what others have while the graph runs, between its passes, and after them."""
        between = use.kept_bytes + self.outside.meanwhile_bytes
        in_forward = use.forward_bytes + self.passing_bytes
        peak_bytes = max(use.peak_bytes, between, in_forward) + self.outside.held_bytes
        return replace(use, peak_bytes=peak_bytes, left_bytes=use.left_bytes + self.results_left_bytes)

    def gradients_of(self, args: Arguments) -> dict[int, int]:
        """Bytes of the gradient of each of ``args`` that an op made, by its storage.

        Those of leaves stay, and none are told where they can't be told apart.
        """
        if args.is_plain:  # as in most steps: all are leaves
            return {}
        graph, given = self.problem.graph, args.trained
        if len(given) != len(graph.gradients) or len(given) == len(args.leaves):  # of some there is none
            return {}
        storages = [graph.values[v].storage for v in graph.gradients]
        once = Counter(storages)
        return {
            compat.storage_key(t): min(graph.storage_bytes[s], t.nbytes)  # it may be part of a larger one
            for t, s in zip(given, storages, strict=True)
            if once[s] == 1 and not t.is_leaf
        }

    def leave_open(self, solve: SolveOptions) -> None:
        """Let another plan be chosen. The options are those of the graph, whatever the budget is."""
        self.is_chosen = False
        if self.options:
            return
        more, exact = self.problem.lowering_bytes, self.made.code is None
        alone = replace(
            self.problem, resident_bytes=0, budget_bytes=None, lowering_bytes=0, meanwhile_bytes=0
        )
        with decision(alone, solve, "choices") as decided:
            decided.plans = decided.plans or choices_once(alone, solve, cache_folder())
        for plan in decided.plans:
            use = use_of(alone, plan)  # its code is taken to differ as that of the plan at hand does
            use = replace(use, peak_bytes=use.peak_bytes + more, forward_bytes=use.forward_bytes + more)
            self.options.append(Option(plan, use, exact))

    def lower(self, number: int) -> bool:
        """Look at the code of the plan at this place of `uses`; False if its use is what it was."""
        option = self.options[number - 1] if number else None
        if option is None or option.is_lowered:
            return False
        assert self.made.code is not None
        before, option.is_lowered = option.use, True
        option.use = replace(before, **self.made.code(option.plan)._asdict())
        return option.use != before

    def choose(self, number: int, args: tuple[Any, ...], resident_bytes: int) -> None:
        """Run by the plan at this place of `uses` from now on, with so much beside the graph."""
        self.is_chosen = True
        if number == 0:
            self.count(resident_bytes)
        else:
            given = Given(0, resident_bytes, self.outside, self.options[number - 1].plan)
            self.made = self.compile(list(args), given)

    @property
    def beside_bytes(self) -> int:
        """What was counted as resident, less what is outside."""
        return self.problem.resident_bytes - self.made.outside.held_bytes

    def count(self, beside_bytes: int) -> None:
        """It stays as it is; its peak is that of the step, with all that is there beside it, and outside."""
        there, meanwhile = beside_bytes + self.outside.held_bytes, self.outside.meanwhile_bytes
        peak_bytes = beside_bytes + self.use.peak_bytes
        problem = replace(self.problem, resident_bytes=there, meanwhile_bytes=meanwhile)
        plan = replace(self.plan, peak_bytes=peak_bytes, digest=problem.digest)
        self.made = replace(self.made, problem=problem, plan=plan, outside=self.outside)
        self.compile.record(problem, plan, self.outside)


def settled(
    graphs: Sequence[Compiled], choose: Callable[[Sequence[Sequence[Use]]], Sequence[int] | None]
) -> Sequence[int] | None:
    """What ``choose`` picks among the graphs' uses, once it is known what the code of those plans needs."""
    while (choice := choose([graph.uses for graph in graphs])) is not None:
        if not any([graph.lower(number) for graph, number in zip(graphs, choice, strict=True)]):
            break
    return choice


def picked(graphs: Sequence[Compiled], choice: Sequence[int]) -> list[Use]:
    """The uses at the places of ``choice``."""
    return [graph.uses[number] for graph, number in zip(graphs, choice, strict=True)]
