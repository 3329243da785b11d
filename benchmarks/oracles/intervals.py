"""The rows of `benchmarks.oracles.moccasin`: events, runs, retention intervals, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from benchmarks.oracles.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a unit: when, whether it must, whether it does, how long each of its blocks stays."""

    start: cp_model.IntVar
    must: bool
    active: cp_model.IntVar
    ends: dict[int, cp_model.IntVar]


@dataclass
class Model:
    """The constraint program: ``turns[u]`` are the events at which u may run, in order."""

    seq: Sequence
    copies: int
    cp: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    turns: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # (event, stage)
    begins: list[int] = field(default_factory=list)  # the first event of each stage, and the end
    closes: list[int] = field(default_factory=list)  # the last
    runs: dict[int, list[Run]] = field(default_factory=dict)
    loose: dict[int, cp_model.IntVar] = field(default_factory=dict)  # ends of tangents

    @property
    def byte_unit(self) -> int:
        """All sizes are multiples of it."""
        work = [u.workspace_bytes for u in self.seq.units]
        return max(1, math.gcd(*self.seq.block_bytes, *work, self.seq.problem.epilogue_bytes))


def model_of(seq: Sequence, copies: int, reservoir: bool) -> Model:
    m = Model(seq, copies)
    _events(m)
    for u in m.turns:
        m.runs[u] = list(_runs(m, u))
        _copy_rows(m, u)
    for span in seq.spans:
        _span(m, span.block, m.begins[span.first], m.closes[span.last])
    for u in m.turns:
        for b in seq.units[u].reads:
            for run in m.runs[u]:
                if not reservoir or b not in seq.maker:
                    _reads(m, b, run.start, run.start, run.active)
            if reservoir and b in seq.maker:
                _reservoir(m, u, b)
    return m


def _events(m: Model) -> None:
    event = 0
    for t, stage in enumerate(m.seq.stages):
        m.begins.append(event)
        for u in stage.may:
            m.turns.setdefault(u, []).append((event, t))
            event += 1
        m.closes.append(event - 1)
    m.begins.append(event)
    m.closes.append(event)


def _runs(m: Model, u: int) -> Iterator[Run]:
    """The first is at the first turn: it must be where the unit must run there. The others are later."""
    unit, turns, end = m.seq.units[u], m.turns[u], m.begins[-1]
    for i in range(min(len(turns), m.copies if u in m.seq.stages[turns[0][1]].must else m.copies + 1)):
        given = turns[:1] if i == 0 else turns[1:]
        start = m.cp.new_int_var_from_domain(cp_model.Domain.from_values([e for e, _ in given]), f"s{u},{i}")
        must = i == 0 and u in m.seq.stages[turns[0][1]].must
        active = m.cp.new_constant(1) if must else m.cp.new_bool_var(f"a{u},{i}")
        yield Run(
            start, must, active, {b: m.cp.new_int_var(given[0][0], end, f"e{b},{i}") for b in unit.makes}
        )


def _copy_rows(m: Model, u: int) -> None:
    runs, unit = m.runs[u], m.seq.units[u]
    for i, run in enumerate(runs):
        for end in run.ends.values():
            m.cp.add(end >= run.start)
        for before in runs[:i]:
            for end in before.ends.values():
                m.cp.add(run.start > end).only_enforce_if(run.active, before.active)
        if i > 1:
            m.cp.add_implication(run.active, runs[i - 1].active)
    m.cp.add(sum(run.active for run in runs) <= (1 if unit.once else m.copies))
    m.cp.add(sum(run.active for run in runs) >= 1)


def _reads(
    m: Model, b: int, start: cp_model.LinearExprT, until: cp_model.LinearExprT, active: cp_model.IntVar
) -> None:
    """Where ``active``: one interval of ``b`` opens before ``start`` and stays to ``until``."""
    if b not in m.seq.maker:
        m.cp.add(m.loose[b] >= until).only_enforce_if(active)
        return
    chosen = []
    for i, run in enumerate(m.runs[m.seq.maker[b]]):
        x = m.cp.new_bool_var(f"x{b},{i}")
        m.cp.add_implication(x, run.active)
        m.cp.add(run.start < start).only_enforce_if(x)
        m.cp.add(run.ends[b] >= until).only_enforce_if(x)
        chosen.append(x)
    m.cp.add_bool_or(chosen).only_enforce_if(active)


def _reservoir(m: Model, u: int, b: int) -> None:
    """+1 as an interval of b opens, -1 as it has closed; each run of u takes one, and gives it back."""
    times: list[cp_model.LinearExprT] = []
    changes, actives = [], []
    for run in m.runs[m.seq.maker[b]]:
        times += [run.start, run.ends[b] + 1]
        changes += [1, -1]
        actives += [run.active] * 2
    for run in m.runs[u]:
        times += [run.start, run.start + 1]
        changes += [-1, 1]
        actives += [run.active] * 2
    m.cp.add_reservoir_constraint_with_active(times, changes, actives, 0, len(times))


def _span(m: Model, b: int, begin: int, until: int) -> None:
    if b not in m.seq.maker and b not in m.loose:
        m.loose[b] = m.cp.new_int_var(until, m.begins[-1], f"e{b}")
    elif b not in m.seq.maker:
        m.cp.add(m.loose[b] >= until)
    else:
        _reads(m, b, begin, until, m.cp.new_constant(1))


def limit_memory(m: Model, slack: bool) -> cp_model.IntVar | None:
    """The cumulative row; with ``slack``, what it goes over the budget by is returned."""
    seq, unit = m.seq, m.byte_unit
    if seq.room_bytes is None:
        return None
    intervals, demands = [], []

    def add(
        start: cp_model.LinearExprT, end: cp_model.LinearExprT, active: cp_model.IntVar, size: int
    ) -> None:
        if size:
            stay = 1 if start is end else m.cp.new_int_var(1, m.begins[-1] + 1, "")
            intervals.append(m.cp.new_optional_interval_var(start, stay, end + 1, active, ""))
            demands.append(size // unit)

    for u, runs in m.runs.items():
        for run in runs:
            for b, end in run.ends.items():
                add(run.start, end, run.active, seq.block_bytes[b])
            add(run.start, run.start, run.active, seq.units[u].workspace_bytes)
    always = m.cp.new_constant(1)
    for b, end in m.loose.items():
        add(m.begins[1], end, always, seq.block_bytes[b])
    add(m.begins[-1], m.begins[-1], always, seq.problem.epilogue_bytes)
    room = seq.room_bytes // unit
    over = m.cp.new_int_var(0, sum(demands) if slack else 0, "over")
    m.cp.add_cumulative(intervals, demands, room + over)
    return over
