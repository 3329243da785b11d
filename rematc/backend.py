"""`backend()`: the whole line, from a joint graph to a forward and a backward that fit the budget."""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from rematc import compat, plans
from rematc.baselines import min_cut
from rematc.cache import cache_folder
from rematc.compiled import ALONE, Given, Made
from rematc.errors import BudgetError, RematcError, error_of_ours, format_bytes, refused
from rematc.fit import fit
from rematc.lower import op_by_op
from rematc.meters import give_way
from rematc.options import Budget, Inner, Options, SolveOptions
from rematc.passes import mark_static, split
from rematc.passes.gathered import groups
from rematc.plan import Plan
from rematc.pose import of_a_loss, pose, say_if_checkpointed
from rematc.problem import Problem
from rematc.ranks import agree, decision, tightest
from rematc.regather import gathered_again, shared
from rematc.resident import gradient_bytes, optimizer_bytes
from rematc.simulate import judged, simulate, validate
from rematc.solve import solve
from rematc.steps import Steps
from rematc.survey import Outside
from rematc.target import target_of
from rematc.versions import check_torch

if TYPE_CHECKING:
    from rematc.inductor import PeakOfCode

log = logging.getLogger(__name__)
TIGHT = (
    "under a budget of %s recomputation takes %.1f times as long as the forward pass, by estimate: "
    "python -m rematc.explain shows what a larger one would take"
)
LAST = (
    "torch compiles this function no more than this once (%s): for inputs of yet another size it runs "
    "eagerly, and no budget is kept. Raise the limit, or pad to fewer sizes"
)
_STEPS: weakref.WeakValueDictionary[Options, Steps] = weakref.WeakValueDictionary()


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
    """A backend for ``torch.compile`` that keeps the peak memory of a training step under ``budget``.

    ``budget`` bounds the peak of forward and backward with everything resident counted in:
    "20GB" (10^9 bytes), "18.5GiB" (2^30), "80%" of the device's memory, a whole number of bytes, or
    None for no limit. ``inner="inductor"`` compiles the two graphs; ``inner="eager"`` runs them op by
    op, exact to the byte. ``reserve`` (bytes, or "2GB") is kept free for what rematc can't see, and
    ``optimizer`` (an optimizer, or a function from parameters to one) has the bytes of its state
    kept free. The solver stops after ``time_limit_s`` seconds (None: 2 to 20, by the number of ops), or
    once the plan is proven to be within ``gap`` of the cheapest.

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

    def __init__(self, options: Options, steps: Steps | None = None) -> None:
        check_torch()
        self.options = options
        self.plans: list[Plan] = []
        self.problems: list[Problem] = []
        self.outside: list[Outside] = []
        # Blocks that are compiled one by one may each have a backend of their own; they are equal, and share.
        self.steps = steps or _STEPS.get(options) or Steps(options)
        if steps is None:
            _STEPS[options] = self.steps

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
        """Compile one graph. An error of ours is raised by the first call of what is returned.

        Raised here it would come wrapped in Dynamo's words, or, with ``suppress_errors``, be
        dropped and the model run with no budget at all.
        """
        compiler = _Compiler(self, gm)
        self.steps.unused.detach()
        if self.options.budget is not None and compat.versions_left() == 0:
            log.warning(LAST, compat.VERSIONS)
        try:
            if self.options.budget is None:
                return compiler(inputs, ALONE).run
            return self.steps.graph(compiler, inputs)
        except RematcError as e:
            return refused(e)

    @property
    def resident_bytes(self) -> int:
        """What is there before a step, as far as it is known by now."""
        there = zip(self.problems, self.outside, strict=True)
        alone = max((p.resident_bytes - outside.held_bytes for p, outside in there), default=0)
        return self.steps.resident_bytes() if self.steps.calls.kinds else alone

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self.options == other.options

    def __hash__(self) -> int:
        return hash(self.options)

    def __repr__(self) -> str:
        return f"rematc.backend(budget={self.options.budget!r}, inner={self.options.inner!r})"


class _Compiler:
    """Compiles a graph for a backend, as often as it takes; the backend has the plan of the last time."""

    def __init__(self, backend: Backend, gm: fx.GraphModule) -> None:
        self.backend = backend
        self.gm = gm
        self.place: int | None = None  # among the backend's plans

    def __call__(self, inputs: Any, given: Given) -> Made:
        """Compile; raises errors of ours as they are."""
        give_way()  # what is measured on the device while compiling is no part of a step
        options, done, before = self.backend.options, list[Partitioned](), sys.exc_info()[1]
        gm = _twin(self.gm)  # compilers change what they are given
        try:
            beside = options.reserve_bytes + optimizer_bytes(options.optimizer, inputs)
            accumulated = gradient_bytes(inputs, options.accumulate)
            state = beside - options.reserve_bytes + accumulated
            if options.inner == "eager":
                partition_fn = partitions(options, done.append, state, given)
                run = compat.aot_eager(gm, inputs, partition_fn=partition_fn, compiler=op_by_op)
            else:
                from rematc.inductor import compile_as_planned
                from rematc.partitioner import Partitioner

                partitioner = Partitioner(options, done.append, state, given, planned=True)
                run = compile_as_planned(gm, inputs, partitioner)
        except Exception as e:
            if (ours := error_of_ours(e, before)) is not None and ours is not e:
                raise ours from None
            raise
        if not done:
            return Made(run)
        plan, forward_ns = done[-1].plan, done[-1].problem.forward_ns
        if plan.status == "greedy":
            log.warning("%s", "; ".join(plan.notes))
        if plan.cost_ns > forward_ns:  # said where it is trained so; explain shows the figure
            log.warning(TIGHT, format_bytes(plan.budget_bytes or 0), plan.cost_ns / max(1, forward_ns))
        problem, outside = done[-1].problem, done[-1].outside
        self.record(problem, plan, outside)
        forward_bytes, peak_of_code = done[-1].forward_bytes, done[-1].peak_of_code
        return Made(run, problem, plan, accumulated, given.others_bytes, outside, forward_bytes, peak_of_code)

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


@dataclass(frozen=True)
class Partitioned:
    """A joint graph, planned and split. The last three are as those of `Made`."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    problem: Problem
    plan: Plan
    outside: Outside
    forward_bytes: int = 0
    peak_of_code: Callable[[Plan], tuple[int, int]] | None = None


def partitions(
    options: Options, record: Callable[[Partitioned], object], state_bytes: int = 0, given: Given = ALONE
) -> Callable[..., Any]:
    """`partition` as AOTAutograd calls it."""

    def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **told: Any) -> Any:
        mark_static(joint, told)
        done = partition(joint, num_fwd_outputs, options, state_bytes, given)
        record(done)
        return done.forward, done.backward

    return partition_fn


def partition(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    options: Options,
    state_bytes: int = 0,
    given: Given = ALONE,
    *,
    planned: bool = False,
) -> Partitioned:
    """Joint graph -> problem -> plan -> forward and backward.

    ``given``: what other graphs of the step leave to it. ``planned``: Inductor will compile them as planned,
    see `rematc.inductor.compile_as_planned`.
    """
    folder = cache_folder()
    target = target_of(joint, options, folder)
    given = replace(given, outside=given.outside | of_a_loss(joint, target))
    if given.plan is None:
        say_if_checkpointed(joint)
    captured, problem = pose(joint, num_fwd_outputs, options, state_bytes, given, target)
    if options.regather:
        problem = tightest(groups(joint), problem)
    peak = None
    if options.inner == "inductor":
        from rematc.inductor import PeakOfCode

        peak = PeakOfCode(joint, captured, problem, num_fwd_outputs, target, planned=planned)
    with decision(problem, options.solve) as decided:
        posed = decided.problem
        taken_over = next(iter(decided.plans), None)
        known = given.plan or taken_over or plans.load(posed, options.solve, folder)
        problem, plan = _planned(posed, options.solve, peak, known, folder)
        decided.plans = (plan,)
    if known is None or known is taken_over:
        plans.keep(posed, options.solve, plan, folder)
    if target.note:
        plan = replace(plan, notes=(*plan.notes, target.note))
    if options.regather:
        agree(groups(joint), plan)
    log.info("%s", plan.summary)
    forward, backward = split(joint, captured, plan, num_fwd_outputs)
    made = Partitioned(forward, backward, problem, plan, given.outside)
    if peak:
        return replace(made, forward_bytes=peak.forward_bytes(plan), peak_of_code=peak.above_resident)
    return replace(made, forward_bytes=simulate(problem, plan).forward_bytes - problem.resident_bytes)


def _planned(
    problem: Problem, options: SolveOptions, peak: PeakOfCode | None, known: Plan | None, folder: Path
) -> tuple[Problem, Plan]:
    """As `_fitted`; where a search has found less than is needed now, what was found then is taken."""
    try:
        return _fitted(problem, options, peak, known)
    except BudgetError as e:
        floor = plans.load_floor(problem, folder)
        plans.keep_floor(problem, e.plan, folder)
        if floor is None or (peak(floor) if peak else floor.peak_bytes) > e.budget_bytes:
            raise
        return _fitted(problem, options, peak, floor)


def _fitted(
    problem: Problem, options: SolveOptions, peak: PeakOfCode | None, known: Plan | None
) -> tuple[Problem, Plan]:
    """The plan, and the problem with what was learned of its code; ``known`` if there is one, and it fits."""
    if peak is not None:
        if problem.budget_bytes is None:  # no limit is no reason to take more than Inductor alone does
            known = min_cut(problem)
            known = gathered_again(problem, known) if shared(problem.graph) else known
        fitted = fit(problem, options, peak, known)
        return fitted.problem, fitted.plan
    plan = judged(problem, known) if known else solve(problem, options)
    validate(problem, plan)
    return problem, plan
