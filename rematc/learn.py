"""What the code of one plan says of the next: what ops need that the graph does not know of, and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import simulate


class OpNeed(NamedTuple):
    """Bytes while an op runs in a plan's code, that run of which needs most: all that is alive, resident
    included, and how much of it is over what the plan says.
    """

    alive_bytes: int
    more_bytes: int


def learned(
    problem: Problem, before: Mapping[int, int], needs: Mapping[int, OpNeed], limit_bytes: int
) -> dict[int, int]:
    """What is known of ops that need more bytes than ``problem`` says, or less: the most that was seen.

    ``before`` is what was known before code was seen that ``needs`` so much. An op that needs more than the
    plan says, and more than ``limit_bytes``, has that from then on (a convolution that copies its weights,
    what a fused kernel has all at once), and all ops of its kind have as much, unless they were seen to need
    less. An op that needs less has that: it writes over what it reads, which then is not alive any more.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((0, 8, 8, 8), tuple(Value(n, s) for s, n in enumerate("x a b c".split())),
    ...           tuple(Op(n, n, (s,), (s + 1,)) for s, n in enumerate("fgh")), inputs=(0,), outputs=(3,))
    >>> chain = Problem(g, (OpCost(5),) * 3)
    >>> more = learned(chain, {}, {0: OpNeed(8, 0), 1: OpNeed(21, 5), 2: OpNeed(16, 0)}, limit_bytes=20)
    >>> more
    {0: 0, 1: 5, 2: 0}
    >>> told = said_of(chain, more)
    >>> told.costs[1], over_graph(told, Plan((), ()), peak_bytes=21)
    (OpCost(runtime_ns=5, workspace_bytes=5), 0)
    """
    of_kind = dict[Hashable, int]()
    for i, need in needs.items():
        if need.alive_bytes > limit_bytes and need.more_bytes > 0:
            kind = _kind(problem, i)
            of_kind[kind] = max(need.more_bytes, of_kind.get(kind, 0))
    more = dict(before)
    for i in range(len(problem.graph.ops)):
        new = of_kind.get(_kind(problem, i), 0)
        seen = min(new, needs[i].more_bytes) if i in needs else new
        if seen > 0:
            more[i] = max(more.get(i, 0), seen)
        elif i in needs:
            less = min(0, max(needs[i].more_bytes, -problem.graph.made_bytes(i)))
            more[i] = max(more.get(i, less), less)
    return more


def said_of(problem: Problem, more: Mapping[int, int]) -> Problem:
    """``problem`` with ``more`` workspace for some of its ops."""
    costs = [*problem.costs]
    for i, size in more.items():
        costs[i] = replace(costs[i], workspace_bytes=costs[i].workspace_bytes + size)
    return replace(problem, costs=tuple(costs))


def over_graph(problem: Problem, plan: Plan, peak_bytes: int) -> int:
    """Bytes by which the code of ``plan`` peaks above what ``problem`` says of it; below that if negative.

    ``peak_bytes``: what it needs. Where that is taken between the passes, the code may need anything less.
    """
    profile = simulate(problem, plan)
    said = max(*profile.live_bytes, profile.end_bytes)
    between = profile.between_bytes if problem.meanwhile_bytes else 0
    return 0 if said <= peak_bytes == between else peak_bytes - said


def _kind(problem: Problem, op: int) -> Hashable:
    """Equal for ops whose code is alike: the same kernel, on values of the same size."""
    graph = problem.graph

    def sizes(values: Iterable[int]) -> tuple[int, ...]:
        return tuple(graph.storage_bytes[graph.values[v].storage] for v in values)

    inputs, outputs = (sizes(v) for v in (graph.ops[op].inputs, graph.ops[op].outputs))
    return graph.ops[op].target, inputs, outputs, problem.costs[op].runtime_ns
