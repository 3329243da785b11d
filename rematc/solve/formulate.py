"""Core -> MILP: what is kept at the start of each stage, what is recomputed in it.

Checkmate's variables (Jain et al. 2020), with stages of the backward pass in place of single ops.
For a block b, a unit u (the op that makes b) and a stage t, all 0 or 1:

    S[b, t]   b is kept at the start of stage t        (S[b, 0]: saved by the forward pass)
    R[u, t]   u runs again in stage t
    A[u]      u runs in the forward pass, for units that its results do not need

Minimise the time of all runs beyond each unit's first. A block that is kept up to a stage that can't
use it is kept up to the next that can: those S are one variable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ortools.math_opt.python import mathopt

from rematc.solve.merge import Merged
from rematc.solve.reduce import Core

Term = tuple[float, mathopt.Variable]
Pairs = frozenset[tuple[int, int]]


@dataclass
class Formulation:
    """The model and its variables; one that could only be 0 is not there."""

    core: Core
    budget_bytes: int | None
    model: mathopt.Model
    kept: dict[tuple[int, int], mathopt.Variable] = field(default_factory=dict)
    again: dict[tuple[int, int], mathopt.Variable] = field(default_factory=dict)
    unfed: dict[tuple[int, int], mathopt.Variable] = field(default_factory=dict)  # R without its inputs
    early: dict[int, mathopt.Variable] = field(default_factory=dict)
    rows_of: set[tuple[int, int | None]] = field(default_factory=set)

    @property
    def byte_unit(self) -> float:
        """Memory rows are in units of the largest block: solvers want numbers near one."""
        return float(max((1, *self.core.block_bytes)))

    @property
    def time_unit(self) -> float:
        """The objective is in units of the dearest unit's time."""
        return float(max((1, *(u.cost_ns for u in self.core.units))))


def formulate(
    core: Core, budget_bytes: int | None, pairs: Pairs | None = None, *, relaxed: bool = False
) -> Formulation:
    """The MILP without the memory rows of single runs: `add_burst` and `add_forward` add those.

    ``pairs``: the (unit, stage) pairs at which a unit may run again, a restriction for speed; None:
    all. ``relaxed`` turns that into a relaxation, good for a lower bound: a unit may run in other
    stages too, and needs no inputs there. One such run just before its first pair stands for all
    earlier ones; the others are where a reader of its block is among the pairs.
    """
    f = Formulation(core, budget_bytes, mathopt.Model(name="rematc"))
    _variables(f, pairs, relaxed)
    _keep_rows(f)
    _input_rows(f)
    _stage_rows(f)
    _objective(f)
    return f


def all_pairs(core: Core) -> Pairs:
    """Every (unit, stage) pair at which recomputing the unit could be of use."""
    useful: frozenset[int] = frozenset()
    found: list[tuple[int, int]] = []
    for t in reversed(range(len(core.stages))):
        useful |= core.upstream(core.stages[t].reads)
        found += [(u, t) for u in useful if not core.units[u].pinned]
    return frozenset(found)


def near(core: Core, window: int) -> Pairs:
    """The (unit, stage) pairs at most ``window`` stages before the unit's block is first read there.

    A unit whose blocks no backward op reads goes with the units that read them.
    """
    span: dict[int, tuple[int, int]] = {}
    for t, stage in enumerate(core.stages):
        for b in stage.reads:
            first, _ = span.get(core.maker[b], (t, t))
            span[core.maker[b]] = (first, t)
    for u in reversed(range(len(core.units))):
        if u in span:
            continue
        spans = [span[w] for b in core.units[u].makes for w in core.readers[b] if w in span]
        if spans:
            span[u] = (min(a for a, _ in spans), max(z for _, z in spans))
    return frozenset((u, t) for u, (a, z) in span.items() for t in range(max(0, a - window), z + 1))


def _variables(f: Formulation, pairs: Pairs | None, relaxed: bool) -> None:
    core = f.core
    before = {} if pairs is None else {u: t - 1 for u, t in sorted(pairs, reverse=True)}
    useful: set[int] = set()
    for t in reversed(range(len(core.stages))):
        reads = set(core.stages[t].reads)
        useful |= core.upstream(reads)
        for u in sorted(useful, reverse=True):  # readers before what they read
            unit = core.units[u]
            fed = {
                w for b in unit.makes for w in core.readers[b] if (w, t) in f.again and (w, t) not in f.unfed
            }
            users = {b: not fed.isdisjoint(core.readers[b]) for b in unit.makes}
            inside = pairs is None or (u, t) in pairs
            used = any(b in reads or users[b] for b in unit.makes)
            once = unit.pinned and unit.required
            if not once and (inside and (used or relaxed or pairs is None)):
                f.again[u, t] = f.model.add_binary_variable(name=f"R{u},{t}")
            elif not once and relaxed and (used or before.get(u) == t):
                f.again[u, t] = f.unfed[u, t] = f.model.add_binary_variable(name=f"R{u},{t}")
            for b in unit.makes:
                _keep_variable(f, b, t, (u, t) in f.again or b in reads or users[b])
    for u, unit in enumerate(core.units):
        if not unit.required:
            f.early[u] = f.model.add_binary_variable(name=f"A{u}")


def _keep_variable(f: Formulation, b: int, t: int, event: bool) -> None:
    if b in f.core.held:
        return
    if event:
        f.kept[b, t] = f.model.add_binary_variable(name=f"S{b},{t}")
    elif (b, t + 1) in f.kept:
        f.kept[b, t] = f.kept[b, t + 1]


def _at_hand(f: Formulation, b: int, t: int) -> list[Term]:
    """S[b, t] + R[maker(b), t]: at least 1 where b can be read in stage t."""
    found = (f.kept.get((b, t)), f.again.get((f.core.maker[b], t)))
    return [(1.0, x) for x in found if x is not None]


def _keep_rows(f: Formulation) -> None:
    """S[b, t+1] <= S[b, t] + R[u, t];  S[b, t] + R[u, t] <= 1;  S[b, 0] <= A[u];  A[u] <= A[w].

    A pinned unit runs once at most: A[u] + sum of R[u, t] <= 1.
    """
    for (b, t), x in f.kept.items():
        u = f.core.maker[b]
        if t > 0 and f.kept.get((b, t - 1)) is not x:
            _row(f, [(1.0, x), *_negative(_at_hand(f, b, t - 1))], 0.0)
        if (u, t) in f.again:
            _row(f, [(1.0, x), (1.0, f.again[u, t])], 1.0)
        if t == 0 and u in f.early:
            _row(f, [(1.0, x), (-1.0, f.early[u])], 0.0)
    for u, x in f.early.items():
        if f.core.units[u].pinned:
            runs = [(1.0, r) for (w, _), r in f.again.items() if w == u]
            _row(f, [(1.0, x), *runs], 1.0)
        for b in f.core.units[u].reads:
            if f.core.maker[b] in f.early:
                _row(f, [(1.0, x), (-1.0, f.early[f.core.maker[b]])], 0.0)


def _input_rows(f: Formulation) -> None:
    """R[u, t] <= S[b, t] + R[maker(b), t] for every b that u reads; what op t reads is at hand."""
    for (u, t), x in f.again.items():
        for b in f.core.units[u].reads:
            if b not in f.core.held and (u, t) not in f.unfed:
                _row(f, [(1.0, x), *_negative(_at_hand(f, b, t))], 0.0)
    for t, stage in enumerate(f.core.stages):
        for b in stage.reads:
            _row(f, _negative(_at_hand(f, b, t)), -1.0)


def _stage_rows(f: Formulation) -> None:
    """While op t runs: its bytes, what it reads, and what is kept past it, within the budget.

    op_bytes[t] + sum of size[b], b read by t, + sum of size[b] * S[b, t+1], other b <= budget;
    the same for its followers, which read no block: after_bytes[t] + sum of size[b] * S[b, t+1].
    """
    size = f.core.block_bytes
    for t, stage in enumerate(f.core.stages):
        past = {b: f.kept[b, t + 1] for b in range(len(size)) if (b, t + 1) in f.kept}
        read = sum(size[b] for b in stage.reads)
        others = [(float(size[b]), x) for b, x in past.items() if b not in stage.reads]
        _memory_row(f, stage.op_bytes + read, others)
        _memory_row(f, stage.after_bytes, [(float(size[b]), x) for b, x in past.items()])


def add_burst(f: Formulation, u: int, t: int) -> bool:
    """The memory row of unit u running again in stage t; False if it is there already.

    before_bytes[t] + sum of size[b] * L[b] + (its outputs and workspace) * R[u, t] <= budget, with,
    for b made before u: L[b] = 1 if op t reads b, else L[b] >= S[b, t+1] and >= R[w, t] for each
    reader w from u on; for b made after u: L[b] = S[b, t].
    """
    if (u, t) in f.rows_of or (u, t) not in f.again:
        return False
    f.rows_of.add((u, t))
    core, size = f.core, f.core.block_bytes
    fixed, terms = core.stages[t].before_bytes, []
    for b in range(len(size)):
        if b in core.held or core.maker[b] == u:
            continue
        if core.maker[b] > u:
            terms += [(float(size[b]), x) for x in (f.kept.get((b, t)),) if x is not None]
        elif b in core.stages[t].reads:
            fixed += size[b]
        else:
            later = [f.again.get((w, t)) for w in core.readers[b] if w >= u]
            terms += _at_least(f, size[b], [f.kept.get((b, t + 1)), *later])
    made = core.units[u].workspace_bytes + sum(size[b] for b in core.units[u].makes)
    kept = [f.kept.get((b, t)) for b in core.units[u].makes]
    terms += [(float(size[b]), x) for b, x in zip(core.units[u].makes, kept, strict=True) if x is not None]
    _memory_row(f, fixed, [*terms, (float(made), f.again[u, t])])
    return True


def add_forward(f: Formulation, merged: Merged, u: int) -> bool:
    """The memory row of unit u of the full core running in forward; False if it is there already.

    resident + what later units that run read + what is saved + its own <= budget.
    """
    if (u, None) in f.rows_of:
        return False
    f.rows_of.add((u, None))
    full, always = merged.full, merged.full.held | merged.kept
    saved = {name: f.kept.get((b, 0)) for b, name in enumerate(merged.full_block)}
    runs = {part: f.early.get(w) for w, parts in enumerate(merged.parts) for part in parts}
    fixed, terms = full.resident_bytes, []
    for b, size in enumerate(full.block_bytes):
        m = full.maker[b]
        readers = [w for w in full.readers[b] if w >= u]
        if m > u:
            continue
        if full.units[m].required and (m == u or b in always or any(full.units[w].required for w in readers)):
            fixed += size
        else:
            own = [runs[u]] if m == u else []
            terms += _at_least(f, size, [saved.get(b), *own, *(runs[w] for w in readers)])
    workspace = full.units[u].workspace_bytes
    if (own_run := runs[u]) is None:
        fixed += workspace
    else:
        terms.append((float(workspace), own_run))
    _memory_row(f, fixed, terms)
    return True


def _at_least(f: Formulation, size: int, candidates: Iterable[mathopt.Variable | None]) -> list[Term]:
    """size * L with L >= each of the candidates; a single candidate stands for itself."""
    given = list(dict.fromkeys(x for x in candidates if x is not None))
    if len(given) <= 1:
        return [(float(size), x) for x in given]
    alive = f.model.add_variable(lb=0.0, ub=1.0)
    for x in given:
        _row(f, [(1.0, x), (-1.0, alive)], 0.0)
    return [(float(size), alive)]


def _memory_row(f: Formulation, fixed_bytes: int, terms: list[Term]) -> None:
    """fixed + terms <= budget, where all terms together could break it."""
    if f.budget_bytes is not None and fixed_bytes + sum(c for c, _ in terms) > f.budget_bytes:
        _row(f, [(c / f.byte_unit, x) for c, x in terms], (f.budget_bytes - fixed_bytes) / f.byte_unit)


def _row(f: Formulation, terms: list[Term], upper: float) -> None:
    f.model.add_linear_constraint(mathopt.LinearSum(c * x for c, x in terms) <= upper)


def _negative(terms: list[Term]) -> list[Term]:
    return [(-c, x) for c, x in terms]


def _objective(f: Formulation) -> None:
    """A unit that forward does not need has its first run for free, wherever it is."""
    runs = [(f.core.units[u].cost_ns, x) for (u, _), x in f.again.items()]
    runs += [(f.core.units[u].cost_ns, x) for u, x in f.early.items()]
    free = sum(f.core.units[u].cost_ns for u in f.early)
    f.model.minimize(mathopt.LinearSum(c / f.time_unit * x for c, x in runs) - free / f.time_unit)
