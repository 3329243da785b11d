"""Checkmate's MILP (Jain et al., MLSys 2020, arXiv:1910.02653), on a `Sequence` of stages.

R[t,i]: unit i runs in stage t; S[t,b]: block b is kept into stage t; FREE[t,b,k]: b is freed once k has
run in stage t; U[t,k]: bytes alive while k would run. Frontier-advancing: stage t ends with its own op.

    min  sum of cost[i] R[t,i]                                                    (1a)
    R[t,i] <= R[t,maker(b)] + S[t,b]                        b read by i           (1b)
    S[t+1,b] + sum over k of FREE[t,b,k] <= S[t,b] + R[t,maker(b)]                (1c), (5) as one row
    U[t,0] = sum of size[b] S[t,b]                                                (2)
    U[t,k+1] = U[t,k] - sum of size[b] FREE[t,b,k] + made[k+1] R[t,k+1]           (3)
    U[t,k] + workspace[k] R[t,k] <= budget
    FREE[t,b,k] <= R[t,k], 1 - S[t+1,b], and 1 - R[t,j] for each reader j after k (5), (6)

The rows of FREE are the paper's with its hazards one by one, which is tighter and leaves FREE continuous.
Its class of plans: `benchmarks.oracles.sequence`. Wider than rematc's solver on large graphs (there
recomputation stands before ops that read forward memory alone), narrower than what `simulate` accepts.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from datetime import timedelta

from ortools.math_opt.python import mathopt

from benchmarks.oracles.fold import sequence
from benchmarks.oracles.sequence import Outcome, Sequence
from rematc.problem import Problem

Reason = mathopt.TerminationReason
Term = tuple[float, mathopt.Variable]
Solver = mathopt.SolverType


@dataclass
class Model:
    """The MILP; bytes are in units of the largest block, times in units of the dearest op."""

    seq: Sequence
    milp: mathopt.Model = field(default_factory=lambda: mathopt.Model(name="checkmate"))
    r: dict[tuple[int, int], mathopt.Variable] = field(default_factory=dict)
    s: dict[tuple[int, int], mathopt.Variable] = field(default_factory=dict)

    @property
    def byte_unit(self) -> float:
        return float(max((1, *self.seq.block_bytes)))

    @property
    def time_unit(self) -> float:
        return float(max((1, *(u.runtime_ns for u in self.seq.units))))

    def row(self, terms: list[Term], upper: float) -> None:
        self.milp.add_linear_constraint(mathopt.LinearSum(c * x for c, x in terms) <= upper)


def solve(
    problem: Problem,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    pauses: int = 0,
    solver: mathopt.SolverType = Solver.HIGHS,
) -> Outcome:
    """The cheapest plan of Checkmate's class, and a lower bound on all of them.

    ``gap`` is relative. The bound holds for the class alone: see the module's docstring.
    Raises `ProblemError` for a problem that can't be posed.
    """
    started = time.monotonic()
    seq = sequence(problem, pauses)
    model = _model(seq)
    left = max(0.1, time_limit_s - (time.monotonic() - started))
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=left),
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=0.0,
        random_seed=1,
    )
    result = mathopt.solve(model.milp, solver, params=parameters)
    return _outcome(model, result, started)


def _outcome(model: Model, result: mathopt.SolveResult, started: float) -> Outcome:
    reason, plan, bound = result.termination.reason, None, 0
    dual = result.termination.objective_bounds.dual_bound
    if math.isfinite(dual):
        ns = dual * model.time_unit
        bound = max(0, math.ceil(ns - 1e-6 * max(1.0, ns)))  # whole numbers, the solver's rounding taken off
    match reason:
        case Reason.OPTIMAL:
            status = "optimal"
        case Reason.FEASIBLE:
            status = "feasible"
        case Reason.INFEASIBLE | Reason.INFEASIBLE_OR_UNBOUNDED:
            return Outcome(None, 0, "infeasible", time.monotonic() - started)
        case _:
            return Outcome(None, bound, "unknown", time.monotonic() - started)
    values = result.variable_values()
    runs = [key for key, x in model.r.items() if values[x] > 0.5]
    saved = [b for (t, b), x in model.s.items() if t == 1 and values[x] > 0.5]
    plan = model.seq.plan(runs, saved, bound, "checkmate")
    return Outcome(plan, plan.bound_ns, status, time.monotonic() - started)


def _model(seq: Sequence) -> Model:
    m = Model(seq)
    _variables(m)
    _spans(m)
    frees = {t: _frees(m, t) for t in range(len(seq.stages))}
    for t in range(len(seq.stages)):
        _data_rows(m, t, frees[t])
        _memory_rows(m, t, frees[t])
    _once_rows(m)
    end = [(size / m.byte_unit, m.s[len(seq.stages), b]) for b, size in _kept(m, len(seq.stages))]
    if seq.room_bytes is not None:
        m.row(end, (seq.room_bytes - seq.problem.epilogue_bytes) / m.byte_unit)
    costs = [(seq.units[u].runtime_ns / m.time_unit, x) for (_, u), x in m.r.items()]
    m.milp.minimize(mathopt.LinearSum(c * x for c, x in costs) - seq.first_runs_ns / m.time_unit)
    return m


def _variables(m: Model) -> None:
    """R for each unit that may run; S for each block that can be there and may be read, or must be there."""
    seq, end = m.seq, len(m.seq.stages)
    made = {span.block: 0 for span in seq.spans if span.block not in seq.maker}
    read: dict[int, int] = {}
    for t, stage in enumerate(seq.stages):
        for u in stage.may:
            lower = float(u in stage.must)
            m.r[t, u] = m.milp.add_variable(lb=lower, ub=1.0, is_integer=True)
            made.update((b, t) for b in seq.units[u].makes if b not in made)
            read.update(dict.fromkeys(seq.units[u].reads, t))
    for span in seq.spans:
        read[span.block] = max(read.get(span.block, 0), span.last)
    for b, first in made.items():
        for t in range(first + 1, min(read.get(b, 0), end) + 1):
            m.s[t, b] = m.milp.add_binary_variable()


def _spans(m: Model) -> None:
    """S[t,b] = 1 over each span, and the same piece of memory: b's maker does not run within it."""
    for span in m.seq.spans:
        for t in range(span.first, span.last + 1):
            m.s[t, span.block].lower_bound = 1.0
            again = m.r.get((t, m.seq.maker.get(span.block, -1)))
            if again is not None and t < len(m.seq.stages):
                again.upper_bound = 0.0


def _kept(m: Model, t: int) -> list[tuple[int, int]]:
    return [(b, size) for b, size in enumerate(m.seq.block_bytes) if (t, b) in m.s]


def _frees(m: Model, t: int) -> dict[tuple[int, int], mathopt.Variable]:
    """FREE[t,b,k], where b may be freed as k has run: k reads or makes b, and no later unit must read b."""
    seq, found = m.seq, {}
    place = {u: n for n, u in enumerate(seq.stages[t].may)}
    for b, size in enumerate(seq.block_bytes):
        maker = seq.maker.get(b)
        users = [u for u in (maker, *seq.readers[b]) if u in place]
        if not size or ((t, b) not in m.s and maker not in place):
            continue
        kept = m.s.get((t + 1, b))
        for n, k in reversed(list(enumerate(users))):
            assert k is not None
            free = found[b, k] = m.milp.add_variable(lb=0.0, ub=1.0)
            m.row([(1.0, free), (-1.0, m.r[t, k])], 0.0)
            for j in users[n + 1 :]:
                assert j is not None
                m.row([(1.0, free), (1.0, m.r[t, j])], 1.0)
            if kept is not None:
                m.row([(1.0, free), (1.0, kept)], 1.0)
            if k in seq.stages[t].must:
                break
    return found


def _data_rows(m: Model, t: int, frees: dict[tuple[int, int], mathopt.Variable]) -> None:
    """(1b) and (1c): what is read or kept is at hand, and what is kept is not freed."""
    seq = m.seq

    def at_hand(b: int) -> list[Term]:
        there = (m.s.get((t, b)), m.r.get((t, seq.maker.get(b, -1))))
        return [(-1.0, x) for x in there if x is not None]

    freed: dict[int, list[Term]] = {b: [] for b in range(len(seq.block_bytes))}
    for (b, _), x in frees.items():
        freed[b].append((1.0, x))
    for u in seq.stages[t].may:
        for b in seq.units[u].reads:
            m.row([(1.0, m.r[t, u]), *at_hand(b)], 0.0)
    for b in freed:
        kept = m.s.get((t + 1, b))
        terms = freed[b] + ([] if kept is None else [(1.0, kept)])
        if terms and (at_hand(b) or kept is not None) and not (t == 0 and b not in seq.maker):
            m.row([*terms, *at_hand(b)], 0.0)


def _memory_rows(m: Model, t: int, frees: dict[tuple[int, int], mathopt.Variable]) -> None:
    """(2), (3) and the budget, U as a variable for each unit of the stage."""
    seq, unit = m.seq, m.byte_unit
    if seq.room_bytes is None:
        return
    room = seq.room_bytes / unit
    level: list[Term] = [(size / unit, m.s[t, b]) for b, size in _kept(m, t)]
    by_unit: dict[int, list[Term]] = {}
    for (b, k), x in frees.items():
        by_unit.setdefault(k, []).append((-seq.block_bytes[b] / unit, x))
    for u in seq.stages[t].may:
        made = sum(seq.block_bytes[b] for b in seq.units[u].makes)
        use = m.milp.add_variable(lb=0.0, ub=room)
        terms = [*level, (made / unit, m.r[t, u]), (-1.0, use)]
        m.milp.add_linear_constraint(mathopt.LinearSum(c * x for c, x in terms) == 0.0)
        if seq.units[u].workspace_bytes:
            m.row([(1.0, use), (seq.units[u].workspace_bytes / unit, m.r[t, u])], room)
        level = [(1.0, use), *by_unit.get(u, [])]


def _once_rows(m: Model) -> None:
    """A pinned unit runs once: the sum of R[t,i] over t is at most 1."""
    for u, unit in enumerate(m.seq.units):
        runs = [(1.0, x) for (_, w), x in m.r.items() if w == u]
        if unit.once and len(runs) > 1:
            m.row(runs, 1.0)
