"""`backend()`: the whole line, from a joint graph to a forward and a backward that fit the budget."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from rematc import compat
from rematc.compiled import ALONE, Given, Made
from rematc.errors import RematcError, error_of_ours, format_bytes, refused
from rematc.lower import op_by_op
from rematc.meters import give_way
from rematc.optimizer import STEP
from rematc.options import Budget, Inner, Options, SolveOptions
from rematc.partition import Partitioned, partitions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.resident import training
from rematc.survey import Outside
from rematc.threads import Threads
from rematc.traced import Traced
from rematc.versions import check_torch

log = logging.getLogger(__name__)
TIGHT = (
    "under a budget of %s recomputation takes %.1f times as long as the forward pass, by estimate: "
    "python -m rematc.explain shows what a larger one would take"
)
LAST = (
    "torch compiles this function no more than this once (%s): for inputs of yet another size it runs "
    "eagerly, and no budget is kept. Raise the limit, or pad to fewer sizes"
)
DIFFERENTIATED = (
    "gradients that a compiled function takes itself (torch.func.grad) are ops of one graph, which has no "
    "backward pass: it gets no plan, and no budget is kept. Compile the function that is differentiated, and "
    "differentiate it outside"
)
_THREADS: weakref.WeakValueDictionary[Options, Threads] = weakref.WeakValueDictionary()


def backend(
    budget: Budget,
    *,
    inner: Inner = "inductor",
    reserve: int | str = 0,
    optimizer: Any = None,
    time_limit_s: float | None = None,
    gap: float = 0.01,
    costs: str = "auto",
    measure_s: float = 20.0,
    accumulate: bool | None = None,
    regather: bool = False,
) -> Backend:
    """A backend for ``torch.compile`` that keeps the peak memory of forward and backward under ``budget``.

    ``budget`` bounds the peak of forward and backward with everything resident counted in:
    "20GB" (10^9 bytes), "18.5GiB" (2^30), "80%" of the device's memory, a whole number of bytes, or
    None for no limit. ``inner="inductor"`` compiles the two graphs; ``inner="eager"`` runs them op by
    op, exact to the byte. ``reserve`` (bytes, or "2GB") is kept free for what rematc can't see, and
    ``optimizer`` (an optimizer, or a function from parameters to one) has the bytes of its state
    kept free; where its own step takes more than the budget, a warning says so. The solver stops after
    ``time_limit_s`` seconds of work (None: 2 to 20, by the number of ops), or once the plan is proven to be
    within ``gap`` of the cheapest.

    ``costs`` says what recomputation is taken to cost: "measured" times each distinct op on the device, for
    ``measure_s`` seconds at most, once, and keeps the figures; "roofline" works them out of the
    device's rates; "h100" (or another card) is for one that isn't there; "auto" measures.

    ``accumulate``: gradients of steps before are there and added to, so they take memory beside the new ones.
    None finds out: a graph that meets gradients it did not know of is compiled once more.

    ``regather``: parameters that ranks share and the graph gathers (as in torchtitan's SimpleFSDP) are never
    kept, but gathered wherever the plan reads them: so all ranks must train on the same shapes in each step.
    Without it they are gathered once in each pass, and forward ops that read them are not recomputed.

    Raises `OptionError` for a setting that can't be read. Compiling raises `BudgetError` where no plan
    fits, with the smallest budget that does, and `PlanError` where ranks that ``regather`` plan apart.

    >>> import rematc, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> fits = rematc.backend(budget="2MB", inner="eager")
    >>> torch.compile(model, backend=fits)(torch.ones(32, 64)).sum().backward()
    >>> [plan.peak_bytes < 2_000_000 for plan in fits.plans]
    [True]
    """
    solve = SolveOptions(time_limit_s, gap)
    return Backend(Options(budget, inner, reserve, optimizer, solve, costs, measure_s, accumulate, regather))


class Backend:
    """What `backend` returns: callable by Dynamo; equal and hashable by its settings.

    ``plans`` has one `Plan` for each training graph compiled with this object, ``problems`` the problem
    of each, and ``outside`` what is known to lie outside of it while it runs; its problem counts that too.
    """

    def __init__(self, options: Options, threads: Threads | None = None) -> None:
        check_torch()
        self.options = options
        self.plans: list[Plan] = []
        self.problems: list[Problem] = []
        self.outside: list[Outside] = []
        # Blocks that are compiled one by one may each have a backend of their own; they are equal, and share.
        self.threads = threads or _THREADS.get(options) or Threads(options)
        if threads is None:
            _THREADS[options] = self.threads

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        """Compile one graph. An error of ours is raised by the first call of what is returned.

        Raised here it would come wrapped in Dynamo's words, or, with ``suppress_errors``, be
        dropped and the model run with no budget at all. Where DDP cuts the graph it is so all the same:
        torch would fail before that call, and say nothing of ours.
        """
        compiler = _Compiler(self, gm, Traced(gm, inputs))
        self.threads.unused.detach()
        if self.options.budget is not None and compat.versions_left() == 0:
            log.warning(LAST, compat.VERSIONS)
        try:
            if self.options.budget is None:
                return compiler(inputs, ALONE).run
            return self.threads.graph(compiler, inputs)
        except RematcError as e:
            if compat.is_cut():
                raise
            return refused(e)

    @property
    def resident_bytes(self) -> int:
        """What is there before a step, as far as it is known by now."""
        there = zip(self.problems, self.outside, strict=True)
        alone = max((p.resident_bytes - outside.held_bytes for p, outside in there), default=0)
        return self.threads.resident_bytes() or alone

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self.options == other.options

    def __hash__(self) -> int:
        return hash(self.options)

    def __deepcopy__(self, _: object) -> Backend:
        """Itself: Lightning copies what ``torch.compile`` is given, and the plans are to be found here."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has plans of its own."""
        return Backend, (self.options,)

    def __repr__(self) -> str:
        return f"rematc.backend(budget={self.options.budget!r}, inner={self.options.inner!r})"


class _Compiler:
    """Compiles a graph for a backend, as often as it takes; the backend has the plan of the last time."""

    def __init__(self, backend: Backend, gm: fx.GraphModule, traced: Traced) -> None:
        self.backend = backend
        self.gm = gm
        self.traced = traced
        self.place: int | None = None  # among the backend's plans

    def __call__(self, inputs: Any, given: Given) -> Made:
        """Compile; raises errors of ours as they are."""
        with compat.compiling():
            return self._compiled(inputs, given)

    def _compiled(self, inputs: Any, given: Given) -> Made:
        give_way()  # what is measured on the device while compiling is no part of a step
        options, done, before = self.backend.options, list[Partitioned](), sys.exc_info()[1]
        gm = _twin(self.gm)  # compilers change what they are given
        try:
            beside = training(options, inputs)
            if options.inner == "eager":
                partition_fn = partitions(options, done.append, beside, given)
                compile = partial(compat.aot_eager, gm, partition_fn=partition_fn, compiler=op_by_op)
            else:
                from rematc.inductor import compile_as_planned
                from rematc.partitioner import Partitioner

                partitioner = Partitioner(options, done.append, beside, given, planned=True)
                compile = partial(compile_as_planned, gm, partitioner=partitioner)
            run = self.traced.trace(compile, inputs)
        except Exception as e:
            if (ours := error_of_ours(e, before)) is not None and ours is not e:
                raise ours from None
            raise
        if not done:
            if compat.differentiates(gm):
                self.backend.threads.say_once(DIFFERENTIATED)
            return Made(run)
        plan, forward_ns = done[-1].plan, done[-1].problem.forward_ns
        if plan.status == "greedy":
            log.warning("%s", "; ".join(note for note in plan.notes if note != done[-1].warning))
        if plan.cost_ns > forward_ns:  # said where it is trained so; explain shows the figure
            log.warning(TIGHT, format_bytes(plan.budget_bytes or 0), plan.cost_ns / max(1, forward_ns))
        problem, outside = done[-1].problem, done[-1].outside
        self.record(problem, plan, outside)
        self.backend.threads.say_once(done[-1].warning, STEP)
        code = done[-1].code
        return Made(run, problem, plan, beside.accumulated_bytes, given.others_bytes, outside, code)

    def anew(self) -> _Compiler:
        """One with plans of its own."""
        return _Compiler(self.backend, self.gm, self.traced)

    def record(self, problem: Problem, plan: Plan, outside: Outside) -> None:
        """The backend has this plan for the graph from now on."""
        lists: tuple[list[Any], ...] = (self.backend.plans, self.backend.problems, self.backend.outside)
        if self.place is None:
            self.place = len(self.backend.plans)
        for known, new in zip(lists, (plan, problem, outside), strict=True):
            known[self.place : self.place + 1] = [new]


def _twin(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy with what Dynamo hung on the module and its inputs: which of them are parameters, for one."""
    twin = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    twin.meta = {**gm.meta}
    for old, new in ((gm, twin), *zip(gm.graph.nodes, twin.graph.nodes, strict=True)):
        for name, value in vars(old).items():
            vars(new).setdefault(name, value)
    return twin
