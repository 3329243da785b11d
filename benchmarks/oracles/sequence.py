"""A `Problem` as both oracles see it: a row of stages, each of which runs some units in a fixed order.

A *unit* is an op that makes memory or costs time, a *block* the storage that it makes. Views are folded
into their block: they cost nothing, and are taken again right after each run of the unit. Two kinds:

* *training*: stage 0 is the forward pass; each backward op is the last of a stage of its own, in which
  forward ops may run again before it, in forward's order, each at most once.
* *DAG* (forward ops alone, and no outputs): each op runs first, in the order of the graph, as the last
  of a stage of its own, in which the ops before it may run again.

This is narrower than what `rematc.simulate` accepts: within a stage the order is the graph's and an op
runs at most once, and an op of which forward returns some results and not others never runs again.
``pauses`` empty stages before each op make up for the first. A view with a price, or of two blocks, is
refused with `ProblemError`; a tangent that nobody reads and nobody holds counts for one whole stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from rematc.graph import Graph
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import judged, validate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an oracle came to: a validated plan if any, and a proven lower bound on all of its class.

    ``status``: "optimal" (within the gap asked for), "feasible", "infeasible" or "unknown" (time was up).
    """

    plan: Plan | None
    bound_ns: int
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Op ``op`` of the graph; ``reads`` and ``makes`` are blocks, ``views`` ops that follow it for free."""

    op: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    runtime_ns: int
    workspace_bytes: int
    once: bool
    views: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The units that may run, in this order, and those of them that must."""

    may: tuple[int, ...]
    must: frozenset[int]


@dataclass(frozen=True, slots=True)
class Span:
    """The block is at hand, on one and the same piece of memory, as stages ``first`` to ``last`` begin.

    Stage ``len(stages)`` is the end. A block without a maker is a tangent: there from its first span on.
    """

    block: int
    first: int
    last: int


@dataclass(frozen=True)
class Sequence:
    """The problem in units, blocks and stages; ``values[b]`` are those worth saving with block b."""

    problem: Problem
    block_bytes: tuple[int, ...]
    values: tuple[tuple[int, ...], ...]
    units: tuple[Unit, ...]
    stages: tuple[Stage, ...]
    spans: tuple[Span, ...]
    resident_views: tuple[int, ...]

    @cached_property
    def maker(self) -> dict[int, int]:
        """Unit by the block that it makes; tangents have none."""
        return {b: u for u, unit in enumerate(self.units) for b in unit.makes}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Units by the block that they read."""
        found: dict[int, list[int]] = {b: [] for b in range(len(self.block_bytes))}
        for u, unit in enumerate(self.units):
            for b in unit.reads:
                found[b].append(u)
        return {b: tuple(units) for b, units in found.items()}

    @property
    def room_bytes(self) -> int | None:
        """What the budget leaves beside what is resident."""
        return self.problem.graph_budget_bytes

    @property
    def first_runs_ns(self) -> int:
        """The time of one run of each unit: that much is not recomputation."""
        return sum(u.runtime_ns for u in self.units)

    def plan(self, runs: Iterable[tuple[int, int]], saved: Iterable[int], bound_ns: int, name: str) -> Plan:
        """The validated plan that runs these (stage, unit) pairs and saves these blocks."""
        steps: list[int] = []
        kept: list[int] = []
        runs = set(runs) if is_dag(self.problem.graph) else {(t, u) for t, u in runs if t > 0}
        of_use, wanted = self._of_use(runs)
        for _, u in of_use:
            steps += [self.units[u].op, *self.units[u].views]
        if not is_dag(self.problem.graph):
            kept = [*self.resident_views, *(v for b in saved if b in wanted for v in self.values[b])]
        plan = judged(self.problem, Plan(tuple(sorted(kept)), tuple(steps), strategy=name))
        plan = replace(plan, bound_ns=min(bound_ns, plan.cost_ns))
        validate(self.problem, plan)
        return plan

    def _of_use(self, runs: set[tuple[int, int]]) -> tuple[list[tuple[int, int]], set[int]]:
        """The runs that must be, or whose results are read before they are made anew; what is read unmade.

        A solver may keep or make what nobody reads where it costs nothing.
        """
        found, wanted = [], {span.block for span in self.spans if span.last == len(self.stages)}
        for t, u in sorted(runs, reverse=True):
            unit = self.units[u]
            if u in self.stages[t].must or not wanted.isdisjoint(unit.makes):
                wanted = wanted.difference(unit.makes).union(unit.reads)
                found.append((t, u))
        return found[::-1], wanted


def is_dag(graph: Graph) -> bool:
    """Is it a general DAG, with no forward and backward pass to it?"""
    return not graph.backward and not graph.outputs and not graph.forward_steps(())
