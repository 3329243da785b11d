"""What each kind of layer saves and recomputes, and why: read off the problem, the plan and two walks.

Nothing is decided here. The walk of the plan says what is alive at its peak, the walk of the plan that
saves everything what would be; the difference is what recomputation frees.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from rematc.baselines import save_all
from rematc.errors import format_bytes
from rematc.graph import Graph
from rematc.layers import read_in_backward
from rematc.mincut import base_name
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.report.kinds import layer_kinds
from rematc.simulate import Profile, simulate

RESULT = "result of the forward pass"
WORTH_TELLING = 0.02  # of what a kind of layer saves

Reason = tuple[str, str]  # what happens, and why


@dataclass
class Row:
    """One kind of layer; only the storages that the backward pass reads count.

    ``pinned`` are bytes by the reason why they may not be computed again, ``chosen`` the storages that are
    saved though they could be, ``dropped`` those that are recomputed. ``ran_ns`` is the time of each op
    target that runs again, ``ran`` how often it does.
    """

    kind: str
    modules: set[str] = field(default_factory=set)
    pinned: Counter[str] = field(default_factory=Counter)
    chosen: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    ran: Counter[str] = field(default_factory=Counter)
    ran_ns: Counter[str] = field(default_factory=Counter)

    @property
    def recompute_ns(self) -> int:
        """Nanoseconds that its ops run again."""
        return sum(self.ran_ns.values())


@dataclass(frozen=True)
class Reading:
    """A plan beside the plan that saves everything, walked over the same problem."""

    problem: Problem
    plan: Plan

    @property
    def graph(self) -> Graph:
        """The graph that is planned for."""
        return self.problem.graph

    @cached_property
    def profile(self) -> Profile:
        """The walk of the plan."""
        return simulate(self.problem, self.plan)

    @cached_property
    def unplanned(self) -> Profile:
        """The walk without any recomputation."""
        return simulate(self.problem, save_all(self.problem))

    @cached_property
    def maker(self) -> dict[int, int]:
        """The forward op that first makes each storage; resident storages have none."""
        made: dict[int, int] = {}
        for i in self.graph.forward:
            for v in self.graph.ops[i].outputs:
                made.setdefault(self.graph.values[v].storage, i)
        return {s: i for s, i in made.items() if s not in self.graph.resident}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """The layer kind of each module path."""
        return layer_kinds(self.graph)

    def bytes_of(self, storages: list[int]) -> int:
        """Bytes of ``storages``."""
        return sum(self.graph.storage_bytes[s] for s in storages)

    @cached_property
    def alive_now(self) -> Counter[int]:
        """Bytes of each storage of the forward pass that is alive at the plan's peak."""
        return self._alive(self.profile)

    @cached_property
    def alive_unplanned(self) -> Counter[int]:
        """The same at the peak without recomputation."""
        return self._alive(self.unplanned)

    def _alive(self, profile: Profile) -> Counter[int]:
        values = [self.graph.values[v] for i in self.graph.forward for v in self.graph.ops[i].outputs]
        storage_of = {v.name: v.storage for v in values}
        found: Counter[int] = Counter()
        for name, size in profile.at_peak:
            if name in storage_of:
                found[storage_of[name]] += size
        return found


def rows(reading: Reading) -> list[Row]:
    """A row for each layer kind of which anything is saved or recomputed, most bytes first."""
    graph, plan = reading.graph, reading.plan
    found: dict[str, Row] = {}

    def row(op: int) -> Row:
        module = graph.ops[op].module
        made = found.setdefault(reading.kinds[module], Row(reading.kinds[module]))
        made.modules.add(module)
        return made

    saved = {graph.values[v].storage for v in plan.saved}
    results = {graph.values[v].storage for v in graph.outputs}
    read = {graph.values[v].storage for v in (*plan.saved, *read_in_backward(graph))}
    for storage in sorted(read):
        if storage not in reading.maker or not graph.storage_bytes[storage]:
            continue
        op = reading.maker[storage]
        reason = graph.ops[op].pin or graph.ops[op].needed or (RESULT if storage in results else None)
        if storage not in saved:
            row(op).dropped.append(storage)
        elif reason:
            row(op).pinned[reason] += graph.storage_bytes[storage]
        else:
            row(op).chosen.append(storage)
    for step in reading.profile.steps:
        if step.recompute and reading.problem.costs[step.op].runtime_ns:
            name = base_name(graph.ops[step.op].target)
            row(step.op).ran[name] += 1
            row(step.op).ran_ns[name] += reading.problem.costs[step.op].runtime_ns
    weight = {r.kind: r.pinned.total() + reading.bytes_of([*r.chosen, *r.dropped]) for r in found.values()}
    return sorted(found.values(), key=lambda r: (-weight[r.kind], -r.recompute_ns, r.kind))


def why(reading: Reading, row: Row) -> str:
    """The reasons, in words: of what is recomputed, then of what is saved, most bytes first."""
    parts = [_recomputed(reading, row)] if row.dropped or row.recompute_ns else []
    reasons = Counter({_pinned(reason): size for reason, size in row.pinned.items()})
    reasons.update(_chosen(reading, row))
    told = [(r, size) for r, size in reasons.most_common() if size >= WORTH_TELLING * reasons.total()]
    for (verb, words), size in told:
        parts.append(f"{verb} {format_bytes(size)}: {words}" if len(told) > 1 else f"{verb}: {words}")
    return "; ".join(parts)


def _pinned(reason: str) -> Reason:
    return "kept" if reason == RESULT else "saved", reason.split(": ")[-1]


def _recomputed(reading: Reading, row: Row) -> str:
    names = [f"{name} x{row.ran[name]}" for name, _ in row.ran_ns.most_common(3)]
    more = len(row.ran) - len(names)
    again = ", ".join(names) + (f", {more} more" if more > 0 else "")
    head = f"recomputed ({again})" if again else "recomputed"
    if not row.dropped:
        return f"{head}: others are made of it"
    freed = sum(reading.alive_unplanned[s] - reading.alive_now[s] for s in row.dropped)
    if freed <= 0:
        return f"{head}: not alive at the peak either way"
    frees = f"{head}: frees {format_bytes(freed)} at the peak"
    return f"{frees}, {_rate(freed, row.recompute_ns)}" if row.recompute_ns else f"{frees}, at no cost here"


def _chosen(reading: Reading, row: Row) -> Counter[Reason]:
    """Why storages are saved though they could be recomputed, and the bytes of each reason.

    What it would cost to recompute them is worked out with everything else left as it is.
    """
    graph, plan, size = reading.graph, reading.plan, reading.bytes_of(row.chosen)
    reasons: Counter[Reason] = Counter()
    if not plan.cost_ns and row.chosen:
        reasons["saved", "nothing is short" if plan.budget_bytes is None else "it fits the budget"] = size
        return reasons
    priced: list[int] = []
    for storage in row.chosen:
        again = _again(reading, [storage])
        once = next((graph.ops[i].pin or graph.ops[i].needed for i in sorted(again) if _once(graph, i)), None)
        if once:
            words = f"made of what may run only once ({once.split(':')[0]})"
            reasons["saved", words] += graph.storage_bytes[storage]
        elif not reading.alive_now[storage]:
            reasons["saved", "not alive at the peak"] += graph.storage_bytes[storage]
        else:
            priced.append(storage)
    if priced:
        size = reading.bytes_of(priced)
        cost_ns = sum(reading.problem.costs[i].runtime_ns for i in _again(reading, priced))
        reasons["saved", f"{duration(cost_ns)} to recompute, {_rate(size, cost_ns)}"] += size
    return reasons


def _again(reading: Reading, storages: list[int]) -> frozenset[int]:
    """The ops that would have to run again if ``storages`` were not saved."""
    graph, saved = reading.graph, reading.plan.saved
    values = [v for v in saved if graph.values[v].storage in storages]
    return graph.ancestors(values, stop={*graph.inputs, *saved}.difference(values))


def _once(graph: Graph, op: int) -> bool:
    return graph.ops[op].pin is not None or graph.ops[op].needed is not None


def _rate(size: int, ns: int) -> str:
    return f"{size / max(ns, 1):.3g} MB/ms"  # bytes per nanosecond are megabytes per millisecond


def duration(ns: int) -> str:
    """``ns`` nanoseconds for people.

    >>> duration(12_345_678), duration(4_500), duration(5)
    ('12.35 ms', '4.5 us', '5 ns')
    """
    if ns >= 10**5 or not ns:
        return f"{ns / 1e6:.2f} ms" if ns else "0 ms"
    return f"{ns / 1e3:.3g} us" if ns >= 10**3 else f"{ns} ns"
