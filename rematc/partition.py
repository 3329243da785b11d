"""`partition`: a joint graph is posed as a problem, planned, and split into a forward and a backward."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from rematc import plans
from rematc.baselines import save_all
from rematc.cache import cache_folder
from rematc.compiled import ALONE, Given
from rematc.errors import BudgetError
from rematc.fit import fit
from rematc.optimizer import said_of_step
from rematc.options import Options, SolveOptions
from rematc.passes import mark_static, split
from rematc.passes.gathered import groups
from rematc.plan import Plan
from rematc.pose import of_a_loss, pose, say_if_checkpointed
from rematc.problem import Problem
from rematc.ranks import agree, decision, tightest
from rematc.resident import NO_TRAINING, Training, forget_peak
from rematc.share import Footprint
from rematc.simulate import judged, validate
from rematc.solve import solve
from rematc.survey import Outside
from rematc.target import device_of, target_of
from rematc.unlimited import unlimited

if TYPE_CHECKING:
    from rematc.peak import PeakOfCode

log = logging.getLogger(__name__)

MUCH = 1.1  # eager PyTorch saves more than kernels do, and code often takes a little more than the graph says


@dataclass(frozen=True)
class Partitioned:
    """A joint graph, planned and split; ``outside`` and ``code`` are as those of `Made`.

    ``warning``: what breaks the budget, whatever the plan is.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    problem: Problem
    plan: Plan
    outside: Outside
    warning: str = ""
    code: Callable[[Plan], Footprint] | None = None


def partitions(
    options: Options,
    record: Callable[[Partitioned], object],
    beside: Training = NO_TRAINING,
    given: Given = ALONE,
) -> Callable[..., Any]:
    """`partition` as AOTAutograd calls it."""

    def partition_fn(joint: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **told: Any) -> Any:
        mark_static(joint, told)
        done = partition(joint, num_fwd_outputs, options, beside, given)
        record(done)
        return done.forward, done.backward

    return partition_fn


def partition(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    options: Options,
    beside: Training = NO_TRAINING,
    given: Given = ALONE,
    *,
    planned: bool = False,
) -> Partitioned:
    """Joint graph -> problem -> plan -> forward and backward.

    ``given``: what other graphs of the step leave to it. ``planned``: Inductor will compile them as planned,
    see `rematc.inductor.compile_as_planned`.
    """
    folder = cache_folder()
    target = target_of(joint, options, folder, given)
    given = replace(given, outside=given.outside | of_a_loss(joint, target))
    if given.plan is None:
        say_if_checkpointed(joint)
    captured, problem = pose(joint, num_fwd_outputs, options, beside, given, target)
    if options.regather:
        problem = tightest(groups(joint), problem)
    peak = None
    if options.inner == "inductor":
        from rematc.peak import PeakOfCode

        peak = PeakOfCode(joint, captured, problem, num_fwd_outputs, target, planned=planned)
    with decision(problem, options.solve) as decided:
        posed = decided.problem
        taken_over = next(iter(decided.plans), None)
        told = given.plan or taken_over
        known = told or plans.load(posed, options.solve, folder)
        again = known is not None and told is None and plans.is_worth_a_search(known)
        search = _searched_again if again else _planned
        problem, plan = search(posed, options.solve, peak, known, folder)
        decided.plans = (plan,)
    if known is None or known is taken_over or again:
        plans.keep(posed, options.solve, plan, folder)
    warning = said_of_step(beside.stepped_bytes, beside.needs, problem.budget_bytes)
    plan = replace(plan, notes=(*plan.notes, *filter(None, (target.note, warning))))
    if options.regather:
        agree(groups(joint), plan)
    log.info("%s", plan.summary)
    forget_peak(device_of(joint))
    forward, backward = peak.split(plan) if peak else split(joint, captured, plan, num_fwd_outputs)
    made = Partitioned(forward, backward, problem, plan, given.outside, warning)
    return replace(made, code=peak.above_resident) if peak else made


def _planned(
    problem: Problem, options: SolveOptions, peak: PeakOfCode | None, known: Plan | None, folder: Path
) -> tuple[Problem, Plan]:
    """As `_fitted`; where a search has found less than is needed now, what was found then is taken."""
    try:
        return _fitted(problem, options, peak, known)
    except BudgetError as e:
        floor = plans.load_floor(problem, folder)
        needed = math.inf if floor is None else peak(floor) if peak else floor.peak_bytes
        if e.minimum_bytes < needed:
            plans.keep_floor(problem, e.plan, folder)
        if needed > e.budget_bytes or floor is None:
            raise
        problem, plan = _fitted(problem, options, peak, floor)
        return problem, plans.as_cut(plan) if e.was_cut else plan


def _searched_again(
    problem: Problem, options: SolveOptions, peak: PeakOfCode | None, known: Plan | None, folder: Path
) -> tuple[Problem, Plan]:
    """The cheaper of ``known``, as `_planned` has it, and what another search finds."""
    log.info("the clock ended the first search for this plan: it is searched for once more")
    found = [_planned(problem, options, peak, known, folder)]
    with suppress(BudgetError):
        found.append(_planned(problem, options, peak, None, folder))
    problem, plan = min(found, key=lambda each: (each[1].cost_ns, -each[1].bound_ns))
    return problem, plans.searched_for_twice(plan)


def _fitted(
    problem: Problem, options: SolveOptions, peak: PeakOfCode | None, known: Plan | None
) -> tuple[Problem, Plan]:
    """The plan, and the problem with what was learned of its code; ``known`` if there is one, and it fits."""
    if peak is not None:
        if problem.budget_bytes is None:
            return _without_limit(problem, options, peak, known)
        fitted = fit(problem, options, peak, known, peak.of_ops)
        return fitted.problem, fitted.plan
    plan = judged(problem, known) if known else solve(problem, options)
    validate(problem, plan)
    return problem, plan


def _without_limit(
    problem: Problem, options: SolveOptions, peak: PeakOfCode, known: Plan | None
) -> tuple[Problem, Plan]:
    """No limit is no reason to take more than what is saved without rematc.

    So if the code of the fastest plan takes `MUCH` more than to save everything would, by the graph, one is
    looked for whose code takes what the graph says of the fastest. A Mamba took 1.8 times what eager takes.
    """
    fastest, resident = unlimited(problem, peak.read_ready_made), problem.resident_bytes
    if peak(fastest) - resident > MUCH * (save_all(problem).peak_bytes - resident):
        limited = replace(peak, problem=problem.with_budget(fastest.peak_bytes), found={})
        with suppress(BudgetError):
            fitted = fit(limited.problem, options, limited, known, limited.of_ops)
            peak.found |= limited.found
            plan = replace(fitted.plan, budget_bytes=None, digest=fastest.digest)
            return fitted.problem.with_budget(None), plan
    fitted = fit(problem, options, peak, fastest, peak.of_ops)
    return fitted.problem, fitted.plan
