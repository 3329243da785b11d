"""What the code of one plan says of the next: what ops need that the graph does not know of, and the rest."""

from __future__ import annotations

import math
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


class Knowledge:
    """What is ``known`` of ``problem`` once code of plans was seen: it with ``more`` for some ops, by their
    numbers, and ``lowering_bytes`` for whatever code needs over that.

    ``needed``: by the code that was seen last, resident included.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = self.known = problem
        self.more: dict[int, int] = {}
        self.needed: float = math.inf

    def learn(
        self, plan: Plan, needs: Mapping[int, OpNeed], best: Plan | None = None, forgets: bool = False
    ) -> None:
        """Of code that peaks where ``plan`` says, and of what its ops were seen to need.

        What is ``known`` then leaves room for the ``best`` plan of which the code fits: a problem without a
        plan takes long to be told from others, and to know that it is one is no use here. What is too much
        for it is not told of ops, but of all code. ``forgets``: that ops of this plan need more than was
        known is not told of them, as it may be true of this plan alone.
        """
        told, more = self._explained(plan, needs, forgets)
        if best and _room(told, best) < 0:
            self.known = _charged(self.known, plan, best)
        else:
            self.known, self.more = told, more
        self.needed = plan.peak_bytes

    def _explained(
        self, plan: Plan, needs: Mapping[int, OpNeed], forgets: bool
    ) -> tuple[Problem, dict[int, int]]:
        """What is said of ops as far as that explains what the code needs, and the rest of all code."""
        budget = self.known.budget_bytes or 0
        limit = max(budget, simulate(self.known, plan).peak_bytes - self.known.lowering_bytes)
        more = most_seen(self.problem, self.more, needs, limit)
        if forgets:
            more = {i: min(size, self.more.get(i, 0)) for i, size in more.items()}
        told = said_of(self.problem, more)
        left = over_graph(told, plan, plan.peak_bytes)
        if left < 0:
            alike = as_alike(self.problem, more)
            told_alike = said_of(self.problem, alike)
            left_then = over_graph(told_alike, plan, plan.peak_bytes)
            if left_then <= 0:  # else the code of this plan is none of where they are
                more, told, left = alike, told_alike, left_then
        # What is told of an op is true of the run that needed most, and may be too much for another.
        left = max(left, 0) if any(size > 0 for size in more.values()) else left
        if plan.peak_bytes == self.needed > budget:  # as before: what was told of ops has not helped
            left = max(left, plan.peak_bytes - budget)
        return replace(told, lowering_bytes=told.lowering_bytes + left), more


def most_seen(
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
    >>> more = most_seen(chain, {}, {0: OpNeed(8, 0), 1: OpNeed(21, 5), 2: OpNeed(16, 0)}, limit_bytes=20)
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


def as_alike(problem: Problem, more: Mapping[int, int]) -> dict[int, int]:
    """``more``, and each op that needs no more than the plan says as little as any of its kind does.

    Where code needs less than is known of its ops, some write in place that were not seen to: in a BERT it
    was the softmax of one layer, and that of another is computed as it is.

    >>> from rematc.graph import Graph, Op, Value
    >>> from rematc.problem import OpCost
    >>> g = Graph((8, 8, 8, 8, 8), tuple(Value(n, s) for s, n in enumerate("x a b c d".split())),
    ...           tuple(Op(n, "exp", (s,), (s + 1,)) for s, n in enumerate("efgh")), (0,), (), (4,))
    >>> as_alike(Problem(g, (OpCost(5),) * 4), {0: -8, 1: 0, 2: 3})
    {0: -8, 1: -8, 2: 3, 3: -8}
    """
    least = dict[Hashable, int]()
    for i, size in more.items():
        least[_kind(problem, i)] = min(size, least.get(_kind(problem, i), 0))
    ops = range(len(problem.graph.ops))
    less = {i: max(least.get(_kind(problem, i), 0), -problem.graph.made_bytes(i)) for i in ops}
    return {i: more[i] if more.get(i, 0) > 0 else less[i] for i in ops}


def _charged(known: Problem, plan: Plan, best: Plan) -> Problem:
    """``known`` with what the code of ``plan`` needs over it, whatever it runs.

    Where ``best`` would not fit then, with half of the room that it leaves: with all of it, nothing would be
    left to find between the two.
    """
    over, room = over_graph(known, plan, plan.peak_bytes), _room(known, best)
    return replace(known, lowering_bytes=known.lowering_bytes + int(over if over <= room else room // 2))


def _room(known: Problem, plan: Plan) -> float:
    """Bytes that ``plan`` leaves of the budget."""
    budget = known.budget_bytes
    return math.inf if budget is None else budget - simulate(known, plan).peak_bytes


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
