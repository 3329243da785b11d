"""What the code of one plan says of the next: what ops need that the graph does not know of, and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from rematc.kernels import made_bytes
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate


class OpNeed(NamedTuple):
    """Bytes while an op runs in a plan's code: the most alive, resident included, and the most over what the
    plan says of that run.
    """

    alive_bytes: int
    more_bytes: int


def learned(
    problem: Problem, before: Problem, plan: Plan, needs: Mapping[int, OpNeed], peak_bytes: int
) -> Problem:
    """``problem`` with what the code of ``plan`` ``needs``, and what was learned ``before``.

    An op whose code needs more than the plan says, and more than the budget, has that as workspace (a
    convolution that copies its weights, what a fused kernel has all at once), and all ops of its kind have as
    much, unless their code was seen to need less. So has a backward op whose code needs less than the plan
    says, below zero: it writes over what it reads.
    ``lowering_bytes`` are what is left: by how much the code peaks, at ``peak_bytes``, above what the plan
    says then, or below it.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 8), tuple(Value(n, s) for s, n in enumerate("x a b c".split())),
    ...           tuple(Op(n, n, (s,), (s + 1,)) for s, n in enumerate("fgh")), inputs=(0,), outputs=(3,))
    >>> chain, plan = Problem(g, (OpCost(5),) * 3, budget_bytes=20), Plan((), ())
    >>> needs = {0: OpNeed(8, 0), 1: OpNeed(21, 5), 2: OpNeed(16, 0)}
    >>> told = learned(chain, chain, plan, needs, peak_bytes=21)
    >>> [cost.workspace_bytes for cost in told.costs], told.lowering_bytes
    ([0, 5, 0], 0)
    """
    told_peak_bytes = simulate(before, plan).peak_bytes - before.lowering_bytes
    limit_bytes = max(problem.budget_bytes or 0, told_peak_bytes)
    over = {op: need for op, need in needs.items() if need.alive_bytes > limit_bytes and need.more_bytes > 0}
    more = _more(problem, before, needs, over)
    costs = tuple(
        replace(cost, workspace_bytes=cost.workspace_bytes + size)
        for cost, size in zip(problem.costs, more, strict=True)
    )
    told = replace(problem, lowering_bytes=0, costs=costs)
    left = over_graph(told, plan, peak_bytes)
    # What is told of an op is true of the run that needed most, and may be too much for another.
    return replace(told, lowering_bytes=max(left, 0) if any(size > 0 for size in more) else left)


def over_graph(problem: Problem, plan: Plan, peak_bytes: int) -> int:
    """Bytes by which the code of ``plan`` peaks above what ``problem`` says of it; below that if negative.

    ``peak_bytes``: what it needs. Where that is taken between the passes, the code may need anything less.
    """
    profile = simulate(problem, plan)
    said = max(*profile.live_bytes, profile.end_bytes)
    between = profile.between_bytes if problem.meanwhile_bytes else 0
    return 0 if said <= peak_bytes == between else peak_bytes - said


def _more(
    problem: Problem, before: Problem, needs: Mapping[int, OpNeed], over: Mapping[int, OpNeed]
) -> list[int]:
    """What each op needs beyond what ``problem`` says, in bytes: the most that was seen."""
    of_kind = dict[Hashable, int]()
    for i, need in over.items():
        kind = _kind(problem, i)
        of_kind[kind] = max(need.more_bytes, of_kind.get(kind, 0))
    found = []
    for i, (old, cost) in enumerate(zip(before.costs, problem.costs, strict=True)):
        known, new = old.workspace_bytes - cost.workspace_bytes, of_kind.get(_kind(problem, i), 0)
        seen = min(new, needs[i].more_bytes) if i in needs else new
        if seen > 0:
            found.append(max(known, seen))
        elif known <= 0 and i in needs and problem.graph.ops[i].phase == "backward":
            # No less than what is alive before it: the solver counts on that.
            less = min(0, max(needs[i].more_bytes, -made_bytes(problem.graph, i)))
            found.append(max(known or less, less))
        else:
            found.append(known)
    return found


def _kind(problem: Problem, op: int) -> Hashable:
    """Equal for ops whose code is alike: the same kernel, on values of the same size."""
    graph = problem.graph

    def sizes(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(graph.storage_bytes[graph.values[v].storage] for v in values)

    inputs, outputs = (sizes(v) for v in (graph.ops[op].inputs, graph.ops[op].outputs))
    return graph.ops[op].target, inputs, outputs, problem.costs[op].runtime_ns
