"""Moccasin's constraint program (Bartan et al., ICML 2023, arXiv:2304.14463), on a `Sequence` of stages.

Each unit v runs at most C times, C = ``copies``. Run i has a start s[v,i] among the *events* of the staged
order: event (t, v) is unit v's turn in stage t. Each block b that v makes has a retention interval from
s[v,i] to an end e[b,i], both events included; a[v,i] says that the run takes place.

    min  sum of cost[v] a[v,i]
    s[v,i+1] > e[b,i] where a[v,i+1]: the intervals of a block follow one another
    cumulative: size[b] over each interval, workspace[v] at s[v,i]; at most the budget at each event
    u run as its j-th time, reading b of v:  some i with  s[v,i] < s[u,j] <= e[b,i]

The last is one literal for each pair (i, j), or with ``reservoir`` the paper's other way: the intervals of b
that are open at s[u,j] number at least one. As in the paper the input order is the first hint, and a first
phase brings its peak under the budget: min max(0, peak - budget). Its plan is the hint of the second.

Its class of plans is that of `benchmarks.oracles.sequence` with at most C runs of each op, the one of
the forward pass included: so its bound is one on such plans alone.
"""

from __future__ import annotations

import math
import time

from ortools.sat.python import cp_model

from benchmarks.oracles.fold import sequence
from benchmarks.oracles.intervals import Model, limit_memory, model_of
from benchmarks.oracles.sequence import Outcome
from rematc.plan import Plan
from rematc.problem import Problem

COPIES = 2


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    pauses: int = 0,
    copies: int = COPIES,
    workers: int = 8,
    reservoir: bool = False,
) -> Outcome:
    """The cheapest plan in which no op runs more than ``copies`` times, and a lower bound on all of those.

    The result is the same each time with one worker and time enough, and may vary with more.
    Raises `ProblemError` for a problem that can't be posed.
    """
    started = time.monotonic()
    seq = sequence(problem, pauses)
    first = None
    if seq.room_bytes is not None:
        model = model_of(seq, copies, reservoir)
        over = limit_memory(model, slack=True)
        assert over is not None
        model.cp.minimize(over)
        _hint_input_order(model)
        solver, status = _search(model, time_limit_s, 0.0, workers)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE) or solver.value(over) > 0:
            proven = status == cp_model.INFEASIBLE or solver.best_objective_bound > 0
            return Outcome(None, 0, "infeasible" if proven else "unknown", time.monotonic() - started)
        first = (model, solver)
    model = model_of(seq, copies, reservoir)
    limit_memory(model, slack=False)
    _minimize_time(model)
    if first is None:
        _hint_input_order(model)
    else:
        _hint(model, *first)
    left = max(0.1, time_limit_s - (time.monotonic() - started))
    return _outcome(model, *_search(model, left, gap, workers), started, first)


def _search(
    model: Model, limit_s: float, gap: float, workers: int
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.relative_gap_limit = gap
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    status = solver.solve(model.cp)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(model.cp.validate())
    return solver, status


def _outcome(
    model: Model,
    solver: cp_model.CpSolver,
    status: cp_model.CpSolverStatus,
    started: float,
    first: tuple[Model, cp_model.CpSolver] | None,
) -> Outcome:
    found, bound = (model, solver), 0
    match status:
        case cp_model.OPTIMAL | cp_model.FEASIBLE:
            bound = max(0, math.ceil(solver.best_objective_bound - 1e-6) - model.seq.first_runs_ns)
            name = "optimal" if status == cp_model.OPTIMAL else "feasible"
        case cp_model.INFEASIBLE:
            return Outcome(None, 0, "infeasible", time.monotonic() - started)
        case _ if first is not None:
            found, name = first, "feasible"
        case _:
            return Outcome(None, 0, "unknown", time.monotonic() - started)
    plan = _plan(*found, bound)
    return Outcome(plan, plan.bound_ns, name, time.monotonic() - started)


def _minimize_time(m: Model) -> None:
    m.cp.minimize(sum(m.seq.units[u].runtime_ns * run.active for u, runs in m.runs.items() for run in runs))


def _hint_input_order(m: Model) -> None:
    """Each unit once, at its first turn; each block kept until its last reader's."""
    for u, runs in m.runs.items():
        for i, run in enumerate(runs):
            m.cp.add_hint(run.start, m.turns[u][min(i, len(m.turns[u]) - 1)][0])
            if not run.must:
                m.cp.add_hint(run.active, int(i == 0))
            for b, end in run.ends.items():
                last = max((m.turns[w][0][0] for w in m.seq.readers[b]), default=m.turns[u][0][0])
                kept = [m.closes[s.last] for s in m.seq.spans if s.block == b]
                m.cp.add_hint(end, max(last, *kept, m.turns[u][0][0]) if i == 0 else m.turns[u][-1][0])


def _hint(m: Model, other: Model, solver: cp_model.CpSolver) -> None:
    for u, runs in m.runs.items():
        for run, found in zip(runs, other.runs[u], strict=True):
            m.cp.add_hint(run.start, solver.value(found.start))
            if not run.must:
                m.cp.add_hint(run.active, solver.value(found.active))
            for b, end in run.ends.items():
                m.cp.add_hint(end, solver.value(found.ends[b]))


def _plan(m: Model, solver: cp_model.CpSolver, bound_ns: int) -> Plan:
    stage_at = {e: (t, u) for u, turns in m.turns.items() for e, t in turns}
    taken = [run for runs in m.runs.values() for run in runs if solver.value(run.active)]
    runs = [stage_at[solver.value(run.start)] for run in taken]
    past = m.begins[1]
    saved = [
        b
        for run in taken
        for b, end in run.ends.items()
        if solver.value(run.start) < past <= solver.value(end)
    ]
    return m.seq.plan(runs, sorted(set(saved)), bound_ns, "moccasin")
