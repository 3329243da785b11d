"""Core -> MILP: what is at hand when each span begins, what is recomputed in it.

Checkmate's variables (Jain et al. 2020), with spans of the backward pass in place of single ops.
For a block b, a unit u (the op that makes b) and a span k, all 0 or 1:

    S[b, k]   b is at hand when span k begins        (S[b, 0]: saved by the forward pass)
    R[u, k]   u runs again in span k
    A[u]      u runs in the forward pass, for units that its results do not need

Minimise the time of all runs beyond each unit's first. Inside a span only that much is asked which
holds whatever the order is, so the optimum is a lower bound; `rows` adds what a given order needs.

Where the end of the backward pass is told exactly, as a `Tail`, it is the last span, and one of its ways is
taken. W[w] may be a fraction: with S[b, k] whole, the cheapest way that finds what it needs is best alone.

    sum of W[w] = 1;  S[b, k] >= sum of W[w] over the ways that need b;  R[u, k] <= sum over those that run u
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rematc.solve.model import Model, Term
from rematc.solve.reduce import Core
from rematc.solve.spans import Spans
from rematc.solve.tail import Tail, Way

Sized = tuple[int, int]  # a variable, and the bytes that it stands for


@dataclass
class Formulation:
    """The model and its variables; one that could only be 0 is not there.

    ``least_peak``: minimise the peak instead of the time; ``budget_bytes`` is then one that can be met.
    """

    core: Core
    budget_bytes: int
    spans: Spans
    least_peak: bool = False
    tail: Tail | None = None  # instead of what is in the last span
    model: Model = field(default_factory=Model)
    kept: dict[tuple[int, int], int] = field(default_factory=dict)
    again: dict[tuple[int, int], int] = field(default_factory=dict)
    early: dict[int, int] = field(default_factory=dict)
    through: dict[tuple[int, int], int] = field(default_factory=dict)
    staying: dict[tuple[int, int], int] = field(default_factory=dict)
    ways: list[tuple[int, Way]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.byte_unit = float(max((1, *self.core.block_bytes)))  # solvers want numbers near one
        self.time_unit = float(max((1, *(u.cost_ns for u in self.core.units))))
        # Of a backward pass presolve finds little, and cuts are weaker after it; of a general DAG much.
        self.model.is_presolved = min(self.core.born, default=-1) >= 0
        if self.least_peak:
            self.peak = self.model.variable(cost=1.0, integer=False)  # of the budget
        else:  # the first run of a unit that forward does not need is free, wherever it is
            self.model.offset = -sum(self.core.units[u].cost_ns for u in self.core.extra) / self.time_unit

    @property
    def told(self) -> range:
        """The spans that are told by variables of their own: all but the tail."""
        return range(len(self.spans) - (self.tail is not None))

    @property
    def unit_of(self) -> dict[int, int]:
        """Units by the variables that are about them. What a tail finds at hand is about none."""
        found = {x: u for (u, k), x in self.again.items() if k in self.told}
        found |= {x: self.core.maker[b] for (b, k), x in self.kept.items() if k in self.told}
        return found | {x: u for u, x in self.early.items()}

    def reads(self, k: int) -> list[int]:
        """Blocks that the ops of span k read."""
        return sorted({b for t in self.spans[k] for b in self.core.stages[t].reads})

    def at_hand(self, b: int, k: int) -> list[Term] | None:
        """S[b, k] + R[maker(b), k], at least 1 where b can be read in span k. None: it can anyway."""
        u = self.core.maker[b]
        if b in self.core.held or (self.core.born[u] >= 0 and self.spans.of(self.core.born[u]) == k):
            return None
        found = (self.kept.get((b, k)), self.again.get((u, k)))
        return [(x, 1.0) for x in found if x is not None]

    def past(self, b: int, t: int) -> int | None:
        """A variable that is 1 if b is alive while the op of stage t runs, and after it (None: never).

        At the end of its span that is S[b, k+1]. Before, a run of b's unit in the span may still
        come: S[b, k+1] - R[u, k] at the least.
        """
        u, k = self.core.maker[b], self.spans.of(t)
        x = self.kept.get((b, k + 1))
        if x is None or self.core.born[u] >= t:
            return None
        if t == self.spans[k][-1] or (u, k) not in self.again:
            return x
        if (b, k) not in self.through:
            self.through[b, k] = y = self.model.variable(integer=False)
            self.model.row([(x, 1.0), (self.again[u, k], -1.0), (y, -1.0)], 0.0)
        return self.through[b, k]

    def stays(self, b: int, k: int) -> int | None:
        """A variable that is 1 if b is there when span k begins, and is not made in it (None: never)."""
        x, again = self.kept.get((b, k)), self.again.get((self.core.maker[b], k))
        if x is None or again is None:
            return x
        if (b, k) not in self.staying:
            self.staying[b, k] = y = self.model.variable(integer=False)
            self.model.row([(x, 1.0), (again, -1.0), (y, -1.0)], 0.0)
        return self.staying[b, k]

    def can_break(self, most_bytes: int) -> bool:
        """Does a row matter whose terms take ``most_bytes`` together?"""
        return self.least_peak or most_bytes > self.budget_bytes

    def memory_row(self, fixed_bytes: int, terms: Sequence[Sized]) -> None:
        """fixed + terms <= budget, where all terms together could break it."""
        scaled = [(x, size / self.byte_unit) for x, size in terms]
        if self.least_peak:
            scaled.append((self.peak, -self.budget_bytes / self.byte_unit))
            self.model.row(scaled, -fixed_bytes / self.byte_unit)
        elif self.can_break(fixed_bytes + sum(size for _, size in terms)):
            self.model.row(scaled, (self.budget_bytes - fixed_bytes) / self.byte_unit)

    def at_least(self, size: int, candidates: Iterable[int | None]) -> list[Sized]:
        """A variable for ``size`` bytes that is no less than any candidate; one alone stands for itself."""
        given = list(dict.fromkeys(x for x in candidates if x is not None))
        if len(given) <= 1:
            return [(x, size) for x in given]
        alive = self.model.variable(integer=False)
        for x in given:
            self.model.row([(x, 1.0), (alive, -1.0)], 0.0)
        return [(alive, size)]

    def floor_ns(self, bound: float) -> int:
        """A bound on the objective in whole nanoseconds, the solver's rounding errors taken off.

        Costs are whole numbers, so a bound just below one is that number.
        """
        if not math.isfinite(bound):
            return 0
        ns = bound * self.time_unit
        return max(0, math.ceil(ns - 1e-6 * max(1.0, ns)))

    def floor_bytes(self, bound: float) -> int:
        """The same for the peak."""
        return math.ceil(bound * self.budget_bytes * (1 - 1e-6)) if math.isfinite(bound) else 0


def formulate(
    core: Core, budget_bytes: int, spans: Spans, *, least_peak: bool = False, tail: Tail | None = None
) -> Formulation:
    """The relaxation: no order inside a span, recomputation itself needs no memory.

    With a ``tail`` the last of ``spans`` is what it tells.
    """
    f = Formulation(core, budget_bytes, spans, least_peak, tail)
    _variables(f)
    if tail:
        _ways(f, tail)
    _kept_rows(f)
    _input_rows(f)
    _memory_rows(f)
    return f


def _variables(f: Formulation) -> None:
    core, model = f.core, f.model
    useful: frozenset[int] = frozenset()
    if f.tail:
        needs = {b for way in f.tail.ways for b in way.needs}
        f.kept.update(((b, len(f.told)), model.variable()) for b in sorted(needs))
        useful = core.upstream(needs)
    for k in reversed(f.told):
        useful |= core.upstream(f.reads(k))
        is_between = core.stages[f.spans[k][-1]].is_between
        for u in sorted(useful):
            unit, born = core.units[u], core.born[u]
            if not (unit.pinned and unit.required) and born < f.spans[k][-1] and not is_between:
                f.again[u, k] = model.variable(0.0 if f.least_peak else unit.cost_ns / f.time_unit)
            if born < f.spans[k][0]:
                f.kept.update(((b, k), model.variable()) for b in unit.makes if b not in core.held)
    for u in core.extra:
        f.early[u] = model.variable(0.0 if f.least_peak else core.units[u].cost_ns / f.time_unit)


def _ways(f: Formulation, tail: Tail) -> None:
    """One way through the tail that fits, by what it needs and what it runs."""
    k, model = len(f.told), f.model
    needed, running = dict[int, list[Term]](), dict[int, list[Term]]()
    for way in tail.ways:
        x = model.variable(way.cost_ns / f.time_unit, integer=False)
        f.ways.append((x, way))
        for b in way.needs:
            needed.setdefault(b, []).append((x, 1.0))
        for u in {u for units in way.runs for u in units}:
            running.setdefault(u, []).append((x, 1.0))
    model.row([(x, -1.0) for x, _ in f.ways], -1.0)
    for b, terms in sorted(needed.items()):
        model.row([*terms, (f.kept[b, k], -1.0)], 0.0)
    for u, terms in sorted(running.items()):
        f.again[u, k] = model.variable(integer=False)
        model.row([(f.again[u, k], 1.0), *negative(terms)], 0.0)


def _kept_rows(f: Formulation) -> None:
    """S[b, k+1] <= S[b, k] + R[u, k];  S[b, 0] <= A[u];  A[u] <= A[w] where u reads what w makes.

    A pinned unit runs once at most: A[u] + sum of R[u, k] <= 1.
    """
    for (b, k), x in f.kept.items():
        u = f.core.maker[b]
        if k > 0 and (there := f.at_hand(b, k - 1)) is not None:
            f.model.row([(x, 1.0), *negative(there)], 0.0)
        elif k == 0 and u in f.early:
            f.model.row([(x, 1.0), (f.early[u], -1.0)], 0.0)
    for u, x in f.early.items():
        if f.core.units[u].pinned:
            f.model.row([(x, 1.0), *((r, 1.0) for (w, _), r in f.again.items() if w == u)], 1.0)
        for b in f.core.units[u].reads:
            if f.core.maker[b] in f.early:
                f.model.row([(x, 1.0), (f.early[f.core.maker[b]], -1.0)], 0.0)


def _input_rows(f: Formulation) -> None:
    """R[u, k] <= S[b, k] + R[maker(b), k] for every b that u reads; what the span's ops read is at hand.

    S[b, k] = 1 for every b that is held, by a view, when the span begins.
    """
    for (u, k), x in f.again.items():
        for b in f.core.units[u].reads if k in f.told else ():
            if (there := f.at_hand(b, k)) is not None:
                f.model.row([(x, 1.0), *negative(there)], 0.0)
    for k in f.told:
        for b in f.reads(k):
            if (there := f.at_hand(b, k)) is not None:
                f.model.row(negative(there), -1.0)
        for b in f.core.stages[f.spans.starts[k]].holds:
            f.model.row([(f.kept[b, k], -1.0)], -1.0)


def _memory_rows(f: Formulation) -> None:
    """When span k begins: before_bytes + sum of size[b] * S[b, k] <= budget.

    While op t runs: op_bytes[t] + what it reads + sum of size[b] * past(b, t), other b <= budget.
    """
    size = f.core.block_bytes
    kept: list[list[int]] = [[] for _ in range(len(f.spans) + 1)]  # the blocks with S, by span
    for b, k in sorted(f.kept):
        kept[k].append(b)
    for k in range(len(f.spans)):
        there = [(f.kept[b, k], size[b]) for b in kept[k]]
        f.memory_row(f.core.stages[f.spans.starts[k]].before_bytes, there)
    for t in _dearest(f):
        stage = f.core.stages[t]
        fixed = stage.op_bytes + sum(size[b] for b in stage.reads)
        others = [b for b in kept[f.spans.of(t) + 1] if b not in stage.reads]
        if f.can_break(fixed + sum(size[b] for b in others)):  # `past` makes variables: only where of use
            past = ((b, f.past(b, t)) for b in others)
            f.memory_row(fixed, [(x, size[b]) for b, x in past if x is not None])


def _dearest(f: Formulation) -> list[int]:
    """Of stages in a span that read the same, and end it or don't, the one whose op needs most: the rows of
    the others say less.
    """
    found: dict[tuple[object, ...], int] = {}
    for t, stage in enumerate(f.core.stages):
        k = f.spans.of(t)
        if k not in f.told:
            break
        alike = (k, t == f.spans[k][-1], stage.reads, stage.unit)
        if alike not in found or stage.op_bytes > f.core.stages[found[alike]].op_bytes:
            found[alike] = t
    return sorted(found.values())


def negative(terms: Iterable[Term]) -> list[Term]:
    """The terms with their signs turned."""
    return [(x, -c) for x, c in terms]
