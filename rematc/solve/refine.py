"""What the MILP tells apart, and how it learns where that is not enough.

A stage that turns out too large gets a span of its own; a unit that turns out too large while it runs again
gets its memory row, first one that holds in any order, and if that is not enough one for the order in
which the plan is written. Rows of the first kind, and spans, leave every plan in: the bound is for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rematc.problem import Problem
from rematc.solve.clock import spend
from rematc.solve.expand import Written, excesses
from rematc.solve.formulate import Formulation, formulate
from rematc.solve.merge import Merged
from rematc.solve.reduce import Core
from rematc.solve.rows import add_burst, add_forward, add_stage
from rematc.solve.spans import Spans, every_stage
from rematc.solve.tail import Tail
from rematc.solve.tighten import Cuts

COEFFICIENT_S = 1.3e-6  # of work
AT_ONCE, APART = 4, 4  # how many stages are told apart in a round, and how far from each other
MANY_AT_ONCE = 16  # where a MILP is soon solved, and rounds are what takes long
ROWS = 16  # other stages that get a row


@dataclass
class Refined:
    """What is told apart by now: spans, stages with a row of their own in those, and runs, as (unit, stage).

    ``forward`` and ``as_one`` are units of the full core that have a row in the forward pass, the latter as
    if merged units always ran there together. ``is_complete``: all rows of the given order are there, and no
    other order is asked about. ``tail``: told exactly, nothing is refined in it. ``cuts``: those along paths
    that mattered so far.
    """

    spans: Spans
    stages: set[int] = field(default_factory=set)
    any_order: set[tuple[int, int]] = field(default_factory=set)
    in_order: set[tuple[int, int]] = field(default_factory=set)
    forward: set[int] = field(default_factory=set)
    as_one: set[int] = field(default_factory=set)
    is_complete: bool = False
    tail: Tail | None = None
    cuts: Cuts = field(default_factory=dict)

    @property
    def bounds_all(self) -> bool:
        """Is the optimum a lower bound on every plan?"""
        return self.is_complete or not (self.in_order or self.as_one)

    def within(self, budget_bytes: int) -> Refined:
        """A copy to refine further, for plans that keep to ``budget_bytes`` with the small blocks counted."""
        tail = self.tail and self.tail.within(budget_bytes)
        return replace(
            self,
            stages={*self.stages},
            any_order={*self.any_order},
            in_order={*self.in_order},
            forward={*self.forward},
            as_one={*self.as_one},
            tail=tail,
            cuts={**self.cuts},
        )

    @property
    def size(self) -> int:
        """Grows with every refinement."""
        told = (self.stages, self.any_order, self.in_order, self.forward, self.as_one)
        return len(self.spans) + sum(len(those) for those in told)


def complete(core: Core) -> Refined:
    """Everything told apart at once. For small graphs."""
    pairs = {(u, t) for t in range(len(core.stages)) for u in range(len(core.units)) if core.born[u] < t}
    forward = {u for u, born in enumerate(core.born) if born < 0}
    return Refined(every_stage(core), set(), set(), pairs, forward, is_complete=True)


def build(problem: Problem, merged: Merged, refined: Refined, *, least_peak: bool = False) -> Formulation:
    """The formulation with all that was refined."""
    assert problem.budget_bytes is not None
    tail = refined.tail
    end = tail.start if tail else len(merged.core.stages)
    spans = refined.spans.ended(end) if tail else refined.spans
    f = formulate(merged.core, problem.budget_bytes, spans, least_peak=least_peak, tail=tail)
    for t in sorted(t for t in refined.stages if t < end and not _is_single(refined, t)):
        add_stage(f, t)
    for u, t in sorted((u, t) for u, t in refined.any_order - refined.in_order if t < end):
        add_burst(f, merged, u, t, ordered=False)
    for u, t in sorted((u, t) for u, t in refined.in_order if t < end):
        add_burst(f, merged, u, t, ordered=True)
    for u in sorted(refined.forward - refined.as_one):
        add_forward(f, merged, u, as_one=False)
    for u in sorted(refined.as_one):
        add_forward(f, merged, u, as_one=True)
    spend(COEFFICIENT_S * len(f.model.coefficient))
    return f


def refine(
    problem: Problem,
    merged: Merged,
    refined: Refined,
    written: Written,
    *,
    at_once: int = AT_ONCE,
    strict: bool = False,
) -> bool:
    """Tell apart what makes ``written`` break the budget; False if all of that was told apart before.

    ``strict``: memory rows are in the given order at once. If not, a stage told apart may be over by the
    small blocks, which no row counts.
    """
    size, known = refined.size, {*refined.forward}
    end = refined.tail.start if refined.tail else len(merged.core.stages)
    full_unit = {unit.op: u for u, unit in enumerate(merged.full.units)}
    unit = {merged.full.units[p].op: u for u, parts in enumerate(merged.parts) for p in parts}
    over: dict[int, int] = {}
    found = [
        (op, t, excess)
        for op, t, excess in excesses(problem, written)
        if strict or excess > merged.small_bytes or t is None or not _is_single(refined, t)
    ]
    found = [(op, t, excess) for op, t, excess in found if t is None or t < end]
    for op, t, excess in found:
        if t is not None:
            over[t] = max(excess, over.get(t, 0))
        elif op in full_unit:
            u = full_unit[op]
            is_said = u in known | merged.apart  # in any row that leaves every plan in
            if strict or (is_said and excess > merged.small_bytes and max(merged.apart, default=-1) >= u):
                refined.as_one.add(u)
            elif not is_said:
                refined.forward.add(u)
    worst = _worst(over, at_once)
    bursts = set(refined.any_order)
    for op, t, _ in found:
        is_first_run = t is not None and op in unit and merged.core.stages[t].unit == unit[op]
        if t in worst and op in unit and not is_first_run and _is_single(refined, t):
            pair = (unit[op], t)
            (refined.in_order if strict or pair in bursts else refined.any_order).add(pair)
    refined.spans = refined.spans.alone(worst)
    if not strict:
        others = {t: e for t, e in over.items() if not _is_single(refined, t)}
        refined.stages.update(_worst(others, ROWS))
    return refined.size > size


def _is_single(refined: Refined, t: int) -> bool:
    return refined.spans.is_single(refined.spans.of(t))


def _worst(over: dict[int, int], at_once: int) -> list[int]:
    """A few stages that are over by most, none near another: once those are mended, the rest may be fine."""
    found: list[int] = []
    for t in sorted(over, key=lambda t: (-over[t], t)):
        if len(found) < at_once and all(abs(t - other) > APART for other in found):
            found.append(t)
    return found
